# SPDX-License-Identifier: Apache-2.0
"""Saves on a tier, for tests of what happens to them later."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import ioshape
from ioshape._core.context import Context
from ioshape._tier.tier import Copy, Tier


class Saver:
    """A tier in `fast` for the destination `slow`. Makes both folders."""

    def __init__(self, folder: Path, fast: Path | None = None) -> None:
        self.fast, self.slow = fast or folder / "fast", folder / "slow"
        for one in (self.fast, self.slow):
            one.mkdir(exist_ok=True)
        self.tier = Tier(Context(), str(self.fast))

    def save(self, name: str, content: bytes = b"saved") -> Path:
        """Save a file on the tier. Return its destination."""
        path = self.slow / name
        with ioshape.open(self.tier.path_for(str(path), len(content)), "wb") as file:
            file.write(content)
        self.tier.keep(str(path))
        return path

    def save_group(self, step: int) -> Path:
        """Save a checkpoint of a group on the tier. Return its destination."""
        path = self.slow / f"step-{step:010d}"
        folder = Path(self.tier.path_for(str(path), 0)).parent
        ioshape.save_group({"step": step}, folder, step=step)
        self.tier.keep(str(path))
        return path

    def copies(self) -> list[Copy]:
        return self.tier.copies()


@contextlib.contextmanager
def saver(folder: Path) -> Iterator[Saver]:
    """Return a saver whose tier is closed at the end of the block."""
    made = Saver(folder)
    with contextlib.closing(made.tier):
        yield made


@contextlib.contextmanager
def undrained(fast: Path) -> Iterator[IO[str]]:
    """Hold the drain lock, like another process whose drain makes no progress."""
    own = fast / f"ioshape-{os.geteuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    with (own / "drain.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def canonical(fast: Path, path: Path) -> Path:
    """Return the path of the copy on the tier."""
    return fast / f"ioshape-{os.geteuid()}" / "files" / str(path)[1:]


@contextlib.contextmanager
def undrained_all(tiers: Iterable[Path]) -> Iterator[None]:
    """Hold the drain locks of several tiers."""
    with contextlib.ExitStack() as stack:
        for tier in tiers:
            stack.enter_context(undrained(tier))
        yield
