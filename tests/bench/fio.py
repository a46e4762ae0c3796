# SPDX-License-Identifier: Apache-2.0
"""Run fio as the yardstick: the speed of the storage for a program that only writes or reads.

Every option that makes fio faster is set: registered buffers and files, as ioshape has, and memory
in huge pages. Without huge pages a large request falls into thousands of small segments, which
halved the speed on the test machine.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .rounds import Sample

MIB = 1 << 20

ENGINES = ("io_uring", "libaio")
BLOCK_MIB = (1, 2, 4, 8, 16)
DEPTHS = (4, 8, 16, 32)

Direction = Literal["write", "read"]


class FioError(Exception):
    pass


@dataclass(frozen=True)
class Tuning:
    engine: str
    block_bytes: int
    depth: int
    huge_pages: bool = True

    def __str__(self) -> str:
        pages = "" if self.huge_pages else " small pages"
        return f"fio {self.engine} {self.block_bytes // MIB}M x {self.depth}{pages}"


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


def environment(tuning: Tuning) -> dict[str, str]:
    """Return variables for huge pages. fio has no option for them, but malloc of glibc 2.35."""
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if tuning.huge_pages else {}


def run(tuning: Tuning, direction: Direction, path: Path, size: int, offset: int = 0) -> Sample:
    """Run fio and return its own time: from the first request to the end of the fsync."""
    command = arguments(tuning, direction, path, size, offset)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,
        env={**os.environ, **environment(tuning)},
    )
    if done.returncode:
        raise FioError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    # fio may print notices before the JSON.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    part = job[direction]
    if job["error"] or not part["io_bytes"]:
        raise FioError(f"{' '.join(command)}: error {job['error']}, {part['io_bytes']} bytes")
    return Sample(part["io_bytes"] / part["bw_bytes"], part["io_bytes"])


def calibrate(
    direction: Direction,
    path: Path,
    size: int,
    before_each: Callable[[], None],
    best: int = 2,
) -> tuple[list[Tuning], dict[str, float]]:
    """Return the fastest settings, and the speeds of all settings.

    Each setting is tried once with a part of the bytes. Reads take another part of the file each
    time, so that caches in the storage do not favour the last ones. The fastest setting is also
    returned with small pages, to show what those cost.
    """
    parts = 4
    part = max(size // parts // (16 * MIB), 1) * 16 * MIB
    speeds: dict[Tuning, float] = {}
    for count, tuning in enumerate(all_tunings()):
        before_each()
        offset = count % parts * part if direction == "read" else 0
        speeds[tuning] = run(tuning, direction, path, part, offset).gb_per_s
    ranking = sorted(speeds, key=lambda tuning: speeds[tuning], reverse=True)
    chosen = [*ranking[:best], replace(ranking[0], huge_pages=False)]
    return chosen, {str(tuning): speeds[tuning] for tuning in ranking}
