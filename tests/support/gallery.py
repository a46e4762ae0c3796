# SPDX-License-Identifier: Apache-2.0
"""Runs a script of tests/gallery three times: undisturbed with stock torch, killed, and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from processes import TIMEOUT_S, environment
from tree import ROOT

FOLDER = ROOT / "tests" / "gallery"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tiny")

#: scripts that cannot resume and start again
BEGINS_AGAIN = {"mnist"}
#: step after which each script saves, or is about to
KILL_AT = 12
#: delays of the kill after that step: during the save, or soon after it
KILL_AFTER_S = (0.0, 0.004, 0.05)


def _run(script: str, folder: Path, *, ours: bool, **variables: str) -> int:
    start = ["-m", "ioshape", "run"] if ours else []
    done = subprocess.run(
        [sys.executable, *start, FOLDER / f"{script}.py", folder],
        env=environment(OMP_NUM_THREADS="1", **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(f"{script} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.returncode


def _losses(folder: Path) -> list[str]:
    return (folder / "losses.txt").read_text(encoding="ascii").splitlines()


def undisturbed(script: str, folder: Path) -> list[str]:
    """Run the script without ioshape. Return its losses, a line for each step."""
    folder.mkdir()
    assert _run(script, folder, ours=False) == 0
    return _losses(folder)


def disturbed(script: str, folder: Path, kill_after_s: float) -> tuple[list[str], int]:
    """Run the script under ioshape, kill it and resume it.

    Return the losses and the step of the resume.
    """
    folder.mkdir()
    killing = {"GALLERY_KILL_AT": str(KILL_AT), "GALLERY_KILL_AFTER_S": str(kill_after_s)}
    trace = str(folder / "trace")
    assert _run(script, folder, ours=True, IOSHAPE_TRACE=trace, **killing) == -signal.SIGKILL
    before = len(_losses(folder))
    assert _run(script, folder, ours=True, IOSHAPE_TRACE=trace) == 0
    lines = _losses(folder)
    return lines, int(lines[before].split()[0])


def tried(script: str, folder: Path) -> str:
    """Return an error message; "" if all losses after a kill equal those of the undisturbed run,
    bit by bit.
    """
    wanted = undisturbed(script, folder / "whole")
    for number, after_s in enumerate(KILL_AFTER_S):
        place = folder / f"killed-{number}"
        lines, resumed_at = disturbed(script, place, after_s)
        if sorted(set(lines)) != sorted(wanted):
            return f"{script}: killed after {after_s} s its losses differ"
        if (resumed_at == 0) != (script in BEGINS_AGAIN):
            return f"{script}: it resumed at step {resumed_at}"
        if not list(place.glob("trace/*.jsonl")):
            return f"{script}: its saves did not come to us"
    return ""
