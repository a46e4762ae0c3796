# SPDX-License-Identifier: Apache-2.0
"""Put the page cache into the state that a benchmark needs."""

import os
from collections.abc import Iterable
from pathlib import Path

from .setting import Setting

# A file is cold if at most this fraction of it is cached, and warm if at most this fraction is not.
STRAY = 0.005
WARM_TRIES = 5
WARM_CHUNK = 1 << 20


class CacheError(Exception):
    """The page cache is not in the required state."""


def cached(setting: Setting, path: Path) -> float:
    """Return the fraction of the file that is in the page cache, from 0 to 1."""
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
    """Read the file until it is cached. Some kernels reclaim pages that were just read."""
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
