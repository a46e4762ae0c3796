# SPDX-License-Identifier: Apache-2.0
"""Tests of tests/tools/stage_times.py, which limits the CPU time of the stages of tests/run.sh."""

import subprocess
import sys
from pathlib import Path

import pytest
import stage_times
from tree import ROOT

PLANNED = {"style": 10, "gcc": 20, "asan": 40, "python": 100}


@pytest.mark.parametrize("slowness", [0.3, 1, 4])
def test_a_slower_machine_is_no_growth(slowness: float) -> None:
    measured = {stage: cpu_s * slowness for stage, cpu_s in PLANNED.items()}
    assert not stage_times.grown(measured, PLANNED)


@pytest.mark.parametrize("stage", PLANNED)
@pytest.mark.parametrize("slowness", [0.3, 1, 4])
def test_a_stage_that_grows_by_more_than_half_is_named(stage: str, slowness: float) -> None:
    measured = {one: cpu_s * slowness for one, cpu_s in PLANNED.items()}
    measured[stage] *= 1.4
    assert not stage_times.grown(measured, PLANNED)
    measured[stage] *= 1.6 / 1.4
    assert [sentence.split()[0] for sentence in stage_times.grown(measured, PLANNED)] == [stage]


def test_cpu_time_that_was_not_counted_is_an_error() -> None:
    assert stage_times.grown(dict.fromkeys(PLANNED, 0), PLANNED)


def test_the_program_reads_what_run_sh_writes(tmp_path: Path) -> None:
    seconds = tmp_path / "seconds.tsv"

    def run() -> "subprocess.CompletedProcess[str]":
        program = ROOT / "tests/tools/stage_times.py"
        command = [sys.executable, str(program), str(seconds)]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    lines = [f"{stage}\t7\t{cpu_s}\n" for stage, cpu_s in stage_times.PLANNED.items()]
    seconds.write_text("".join(lines), encoding="utf-8")
    assert run().returncode == 0
    lines[-1] = "python\t7\t99999\n"
    seconds.write_text("".join(lines), encoding="utf-8")
    told = run()
    assert told.returncode == 1
    assert "python computes for 99999 s" in told.stdout
    assert "tests/tools/stage_times.py" in told.stdout
