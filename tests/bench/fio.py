# SPDX-License-Identifier: Apache-2.0
"""Run fio as the yardstick: the speed of the storage for a program that only writes or reads.

Every option that makes fio faster is set: registered buffers and files, as ioshape has, and memory
in huge pages. Without huge pages a large request falls into thousands of small segments, which
halved the speed on the test machine.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from .rounds import Contestants, Sample

MIB = 1 << 20

ENGINES = ("io_uring", "libaio")
BLOCK_MIB = (1, 2, 4, 8, 16)
DEPTHS = (4, 8, 16, 32)
#: fio's memory is in huge pages. fio has no option for them, but malloc of glibc 2.35.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
#: So many of the fastest settings take part in all rounds, which decide between them.
BEST = 2

Direction = Literal["write", "read"]


class FioError(Exception):
    pass


@dataclass(frozen=True)
class Tuning:
    engine: str
    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"fio {self.engine} {self.block_bytes // MIB}M x {self.depth}"


def all_tunings() -> list[Tuning]:
    return [
        Tuning(engine, mib * MIB, depth)
        for engine in ENGINES
        for mib in BLOCK_MIB
        for depth in DEPTHS
    ]


def version() -> str:
    return subprocess.run(
        ["fio", "--version"], check=True, capture_output=True, text=True
    ).stdout.strip()


def arguments(
    tuning: Tuning, direction: Direction, path: Path, size: int, offset: int = 0
) -> list[str]:
    """Return fio's command line. By default fio preallocates before its clock starts."""
    given = {
        "name": "bench",
        "filename": str(path).replace(":", r"\:"),
        "rw": direction,
        "direct": 1,
        "ioengine": tuning.engine,
        "bs": tuning.block_bytes,
        "iodepth": tuning.depth,
        "size": size,
        "offset": offset,
        "output-format": "json",
    }
    if direction == "write":
        given["end_fsync"] = 1
    if tuning.engine == "io_uring":
        given |= {"fixedbufs": 1, "registerfiles": 1}
    return ["fio", *(f"--{name}={value}" for name, value in given.items())]


def run(tuning: Tuning, direction: Direction, path: Path, size: int, offset: int = 0) -> Sample:
    """Run fio and return its own time: from the first request to the end of the fsync."""
    command = arguments(tuning, direction, path, size, offset)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env={**os.environ, **HUGE_PAGES},
    )
    if done.returncode:
        raise FioError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    # fio may print notices before the JSON.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    part = job[direction]
    if job["error"] or not part["io_bytes"]:
        raise FioError(f"{' '.join(command)}: error {job['error']}, {part['io_bytes']} bytes")
    return Sample(part["io_bytes"] / part["bw_bytes"], part["io_bytes"])


def contestants(
    tunings: Iterable[Tuning], direction: Direction, path: Path, size: int
) -> Contestants:
    """Return runs with these settings, of as many bytes as whole blocks have."""
    whole = size // (16 * MIB) * 16 * MIB
    return {str(one): partial(run, one, direction, path, whole) for one in tunings}


def calibrate(
    direction: Direction, path: Path, size: int, before_each: Callable[[], None]
) -> tuple[Contestants, dict[str, float]]:
    """Return runs with the fastest settings, and the speeds of all settings.

    Each setting is tried once with a part of the bytes. Reads take another part of the file each
    time, so that caches in the storage do not favour the last ones.
    """
    parts = 4
    part = max(size // parts // (16 * MIB), 1) * 16 * MIB
    speeds: dict[Tuning, float] = {}
    for count, tuning in enumerate(all_tunings()):
        before_each()
        offset = count % parts * part if direction == "read" else 0
        speeds[tuning] = run(tuning, direction, path, part, offset).gb_per_s
    ranking = sorted(speeds, key=lambda tuning: speeds[tuning], reverse=True)
    found = contestants(ranking[:BEST], direction, path, size)
    return found, {str(tuning): speeds[tuning] for tuning in ranking}
