# SPDX-License-Identifier: Apache-2.0
"""Ways of the storm in which programs write that know nothing of ioshape.

Half of the ranks run `cp`, the others save a numpy array. Both sync the file, as `fsync` in a
program or `sync FILE` in a script does.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ioshape._cli import bench_members as members
from preloaded import LIBRARY
from tree import build_folder

#: Files of the storm are this much smaller than those of trainings, and so is the threshold.
SCALE = 16
THRESHOLD_BYTES = (64 << 20) // SCALE

PRELOAD = {
    "LD_PRELOAD": str(build_folder() / LIBRARY),
    "IOSHAPE_PRELOAD_BYTES": str(THRESHOLD_BYTES),
}

# Without the program's start: a training writes with an interpreter that runs already.
_NUMPY = """
import json, os, sys
import numpy
for line in sys.stdin:
    path, n_bytes = json.loads(line)
    with open(path, "wb") as file:
        numpy.save(file, numpy.full(n_bytes // 4, 1.5, dtype=numpy.float32))
        file.flush()
        os.fsync(file.fileno())
    print(flush=True)
"""


class _Saver:
    """A Python process that saves numpy arrays."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NUMPY],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def save(self, path: Path, n_bytes: int) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([str(path), n_bytes]) + "\n")
        stdin.flush()
        if stdout.readline() != "\n":
            raise OSError(f"numpy cannot save {path}")


@cache
def _saver(is_preloaded: bool) -> _Saver:
    return _Saver(PRELOAD if is_preloaded else {})


@cache
def _source(n_bytes: int) -> str:
    """Return the path of a file in memory, which is gone when this process ends."""
    file = os.memfd_create("source")
    with open(file, "wb", closefd=False) as stream:
        stream.write(os.urandom(1 << 20) * (n_bytes >> 20))
    return f"/proc/{os.getpid()}/fd/{file}"


def _copy(path: Path, n_bytes: int, variables: dict[str, str]) -> None:
    command = ["cp", "--reflink=never", _source(n_bytes), str(path)]
    subprocess.run(command, env={**os.environ, **variables}, check=True)
    subprocess.run(["sync", str(path)], check=True)


def _by_program(
    is_preloaded: bool,
) -> Callable[[members.State, members.RankSetup, members.Order], members.Saved]:
    def save(state: members.State, setup: members.RankSetup, order: members.Order) -> members.Saved:
        del state
        path = setup.folder / order.way / f"step-{order.step}-rank-{setup.rank:05d}.pt"
        if setup.rank % 2:
            saver = _saver(is_preloaded)
            begin = time.monotonic_ns()
            saver.save(path, setup.n_bytes)
        else:
            _source(setup.n_bytes)
            begin = time.monotonic_ns()
            _copy(path, setup.n_bytes, PRELOAD if is_preloaded else {})
        end = time.monotonic_ns()
        return members.Saved(begin, end, end, None, [("write", begin, end)])

    return save


PLAIN, PRELOADED = "programs", "preloaded"


def add() -> None:
    """Add the ways to those of the storm."""
    members.WAYS.update({PLAIN: _by_program(False), PRELOADED: _by_program(True)})
