# SPDX-License-Identifier: Apache-2.0
"""Saves on a tier, for the tests of what becomes of them."""

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
    """A tier in `fast`, for what belongs into `slow`; neither need be there."""

    def __init__(self, folder: Path, fast: Path | None = None) -> None:
        self.fast, self.slow = fast or folder / "fast", folder / "slow"
        for one in (self.fast, self.slow):
            one.mkdir(exist_ok=True)
        self.tier = Tier(Context(), str(self.fast))

    def save(self, name: str, content: bytes = b"saved") -> Path:
        """Onto the tier; its destination."""
        path = self.slow / name
        with ioshape.open(self.tier.place(str(path), len(content)), "wb") as file:
            file.write(content)
        self.tier.keep(str(path))
        return path

    def save_directory(self, name: str, **contents: bytes) -> Path:
        """The same with files in it."""
        path = self.slow / name
        with ioshape.directory(self.tier.place(str(path), 0)) as folder:
            for file, content in contents.items():
                Path(folder, file).write_bytes(content)
        self.tier.keep(str(path))
        return path

    def copies(self) -> list[Copy]:
        return self.tier.copies()


@contextlib.contextmanager
def saver(folder: Path) -> Iterator[Saver]:
    """Its tier is closed when the block ends."""
    made = Saver(folder)
    with contextlib.closing(made.tier):
        yield made


@contextlib.contextmanager
def undrained(fast: Path) -> Iterator[IO[str]]:
    """Another process is draining the tier, and gets nowhere."""
    own = fast / f"ioshape-{os.geteuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    with (own / "drain.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def place_of(fast: Path, path: Path) -> Path:
    """Where the copy lies."""
    return fast / f"ioshape-{os.geteuid()}" / "files" / str(path)[1:]


@contextlib.contextmanager
def undrained_all(tiers: Iterable[Path]) -> Iterator[None]:
    """The same of several tiers."""
    with contextlib.ExitStack() as stack:
        for tier in tiers:
            stack.enter_context(undrained(tier))
        yield
