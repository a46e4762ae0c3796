# SPDX-License-Identifier: Apache-2.0
"""fio as the yardstick: what this machine's storage gives to a program that only writes or reads."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
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
class Setting:
    engine: str
    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"fio {self.engine} {self.block_bytes // MIB}M x {self.depth}"


def all_settings() -> list[Setting]:
    return [
        Setting(engine, mib * MIB, depth)
        for engine in ENGINES
        for mib in BLOCK_MIB
        for depth in DEPTHS
    ]


def version() -> str:
    return subprocess.run(
        ["fio", "--version"], check=True, capture_output=True, text=True
    ).stdout.strip()


def arguments(
    setting: Setting, direction: Direction, path: Path, size: int, offset: int = 0
) -> list[str]:
    """Everything not given here is fio's default: it preallocates the file and fills its buffers."""
    given = {
        "name": "bench",
        "filename": str(path).replace(":", r"\:"),
        "rw": direction,
        "direct": 1,
        "ioengine": setting.engine,
        "bs": setting.block_bytes,
        "iodepth": setting.depth,
        "size": size,
        "offset": offset,
        "output-format": "json",
    }
    if direction == "write":
        given["end_fsync"] = 1
    return ["fio", *(f"--{name}={value}" for name, value in given.items())]


def run(setting: Setting, direction: Direction, path: Path, size: int, offset: int = 0) -> Sample:
    """fio's own clock counts: from the first request to the end of the fsync, without its start."""
    command = arguments(setting, direction, path, size, offset)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path.parent)
    if done.returncode:
        raise FioError(f"{' '.join(command)}: {done.stderr or done.stdout}")
    # Notices may stand before the JSON.
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
    best: int = 3,
) -> tuple[list[Setting], dict[str, float]]:
    """The fastest settings, each tried once with a part of the bytes, and what all of them gave.

    Reading takes another part of the file each time, so that caches below us do not favour the last.
    """
    parts = 4
    part = max(size // parts // (16 * MIB), 1) * 16 * MIB
    speeds: dict[Setting, float] = {}
    for count, setting in enumerate(all_settings()):
        before_each()
        offset = count % parts * part if direction == "read" else 0
        speeds[setting] = run(setting, direction, path, part, offset).gb_per_s
    ranking = sorted(speeds, key=lambda setting: speeds[setting], reverse=True)
    return ranking[:best], {str(setting): speeds[setting] for setting in ranking}
