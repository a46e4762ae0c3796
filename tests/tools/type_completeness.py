# SPDX-License-Identifier: Apache-2.0
"""Measures how much of the package's types a type checker knows: "basedpyright --verifytypes".

Classes that derive from a class of DeepSpeed, Megatron or transformers are known only where these
are installed. Stubs in typed_frameworks stand for them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def of_package() -> tuple[float, list[str]]:
    """Return the percentage of known types, and the public names whose type is not known."""
    told = subprocess.run(
        [
            *(Path(sys.executable).parent / "basedpyright", "--pythonpath", sys.executable),
            *("--verifytypes", "ioshape", "--ignoreexternal", "--outputjson"),
        ],
        check=False,  # it fails below 100 %
        env={**os.environ, "PYTHONPATH": str(Path(__file__).with_name("typed_frameworks"))},
        capture_output=True,
        text=True,
    ).stdout
    types = json.loads(told)["typeCompleteness"]
    unknown = [
        one["name"].removeprefix("ioshape.")
        for one in types["symbols"]
        if one["isExported"] and not one["isTypeKnown"]
    ]
    return round(100 * types["completenessScore"], 1), unknown
