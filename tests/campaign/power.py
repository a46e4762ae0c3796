# SPDX-License-Identifier: Apache-2.0
"""Test power failures during saves, and saves on a device that fails.

A trial saves on one filesystem, on a device that logs its writes. Then it makes images of what the
disk may hold after a prefix of the writes. It mounts each image and checks that every acknowledged
save is there.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .trial import CannotTry, Trial

FILESYSTEMS = ("ext4", "xfs", "btrfs")
N_IMAGES = 15

#: Seconds after which a trial hangs.
PATIENCE_S = 600.0

#: The processes end even if the starting process is killed.
APART = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
)


class _Machine:
    """The client of power_machine.py."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._process = subprocess.Popen(
            [*APART, sys.executable, "-m", "tests.campaign.power_machine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the machine
        )

    def _read_line(self) -> str:
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        return self._process.stdout.readline() if ready else ""

    def why_not(self) -> str:
        """Return why this computer cannot run trials, or "" if it can."""
        line = self._read_line()
        return line.strip() if line else "no namespaces of its own for mounts and processes"

    def ask(self, seed: int, images: int, *, durable: bool = True) -> dict[str, Any]:
        request = {
            "seed": seed,
            "filesystem": FILESYSTEMS[seed % len(FILESYSTEMS)],
            "images": images,
            "durable": durable,
            "work": str(self._work),
        }
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._read_line() or "{}")
        if not answer:
            raise RuntimeError(f"power, seed {seed}: the trial broke off, or does not end")
        return answer

    def close(self) -> None:
        """Kill the process. All that it has made ends with it."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    """Yield trials of power failures."""
    machine = _Machine(work)
    try:
        if why_not := machine.why_not():
            raise CannotTry(f"power: {why_not}")
        # Saves without a sync must lose something. That shows that the trials notice a loss.
        if not machine.ask(0, 8, durable=False)["findings"]:
            raise RuntimeError("power: files that nobody synced were not missed; it sees no loss")
        yield lambda seed: _try(machine, seed)
    finally:
        machine.close()


def _try(machine: _Machine, seed: int) -> Trial:
    found = machine.ask(seed, N_IMAGES)
    return Trial(
        counts={
            "power_images": found["images"],
            "power_eio": found["eio"],
            "power_lost": len(found["findings"]),
        },
        findings=found["findings"],
    )
