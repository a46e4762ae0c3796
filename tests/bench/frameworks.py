# SPDX-License-Identifier: Apache-2.0
"""Measure what training frameworks gain from ioshape (`tests/bench.sh frameworks`)."""

import sys
from importlib import metadata

from . import (
    frameworks_dcp,
    frameworks_safetensors,
    frameworks_small,
    frameworks_stall,
)
from .setting import Outcome, Setting

# Each entry is measure(setting, outcome) of one module, which appends its figures and samples. The
# folder is empty when it begins, and the files that it leaves there are removed.
PARTS = (
    frameworks_small.measure,
    frameworks_dcp.measure,
    frameworks_safetensors.measure,
    frameworks_stall.measure,
)

# The results name the versions of those that are installed.
PACKAGES = ("ioshape", "torch", "safetensors", "lightning", "transformers", "deepspeed")


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["versions"] = versions()
    for part in PARTS:
        part(setting, outcome)
    return outcome
