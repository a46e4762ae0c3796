# SPDX-License-Identifier: Apache-2.0
"""Test ioshape.megatron: megatron-core saves through ioshape and loads these files as before."""

import subprocess
from pathlib import Path

import frameworks
import pytest
from processes import environment, run_program
from records import names_in
from tree import ROOT

PROGRAM = ROOT / "tests" / "support" / "programs" / "megatron_ranks.py"


@pytest.mark.long
def test_two_ranks_save_through_us_and_megatron_loads_it(tmp_path: Path) -> None:
    try:
        python = frameworks.environment("megatron")
    except frameworks.CannotInstall as problem:
        pytest.skip(str(problem))
    variables = environment(IOSHAPE_TRACE=str(tmp_path / "trace"))
    ranks = [
        subprocess.Popen((python, str(PROGRAM), str(rank)), cwd=tmp_path, env=variables)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(600) for rank in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
    told = "".join(path.read_text() for path in (tmp_path / "trace").iterdir())
    for name in ("now", "later"):
        assert names_in(tmp_path / name) == [
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
            "common.pt",
            "metadata.json",
        ]
        assert told.count(f'"{name}/__') == 2


MISSING = """
    import sys

    sys.modules["megatron"] = None
    try:
        import ioshape.megatron
    except ImportError as error:
        assert "pip install megatron-core" in str(error)
    else:
        raise AssertionError("imported")
"""


def test_without_megatron(tmp_path: Path) -> None:
    run_program(tmp_path, MISSING)
