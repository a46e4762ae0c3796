# SPDX-License-Identifier: Apache-2.0
"""The page cache, brought into the state that is to be measured."""

import os
from collections.abc import Iterable
from pathlib import Path

from .setting import Setting

# What may be left of a file in the page cache for it to count as cold, and missing for warm.
STRAY = 0.005
WARM_TRIES = 5
WARM_CHUNK = 1 << 20


class CacheError(Exception):
    """The page cache is not in that state."""


def cached(setting: Setting, path: Path) -> float:
    """How much of the file, from 0 to 1."""
    return float(setting.worker.ask("cached", path=path)["cached"])


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def require_cold(setting: Setting, paths: Iterable[Path]) -> None:
    for path in paths:
        if (left := cached(setting, path)) > STRAY:
            raise CacheError(f"{left:.1%} of {path} stay in the page cache; who else reads it?")


def make_warm(setting: Setting, path: Path) -> None:
    """Some kernels take back pages that have just been read: they are read again."""
    for _ in range(WARM_TRIES):
        if cached(setting, path) >= 1 - STRAY:
            return
        buffer = bytearray(WARM_CHUNK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    if (there := cached(setting, path)) < 1 - STRAY:
        raise CacheError(
            f"only {there:.1%} of {path} fit into the page cache; use a smaller --size"
        )
