# SPDX-License-Identifier: Apache-2.0
"""How fast a filesystem takes bytes from a program that does nothing else: the ceiling of a save.

Direct writes of large blocks by several threads, and an fsync, with the setting that is the fastest
here.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
_PAGE = 4096


class CeilingError(Exception):
    """This way does not work here."""


@dataclass(frozen=True)
class Written:
    """What a run gave."""

    seconds: float
    n_bytes: int

    @property
    def gb_per_s(self) -> float:
        return self.n_bytes / self.seconds / 1e9


def _block_for(n_bytes: int, wanted: int) -> int:
    """A block that fits into the file: a power of two."""
    return min(wanted, max(_PAGE, 1 << (n_bytes.bit_length() - 1)))


@dataclass(frozen=True)
class Writer:
    """Threads that write blocks from one buffer, past the page cache if that works here."""

    block_bytes: int
    threads: int
    direct: bool = True

    @property
    def name(self) -> str:
        how = "direct" if self.direct else "buffered"
        return f"{how} writes {self.block_bytes // MIB}M x {self.threads} threads"

    def write(self, path: Path, n_bytes: int) -> Written:
        block = _block_for(n_bytes, self.block_bytes)
        count = n_bytes // block
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.direct else 0)
        try:
            file = os.open(path, flags, 0o600)
        except OSError as error:
            raise CeilingError(str(error)) from None
        try:
            if self.direct:
                _preallocate(file, count * block)
            with mmap.mmap(-1, block) as buffer:  # begins on a page, as direct writes need
                buffer.write(os.urandom(block))
                begin = time.perf_counter()
                _write_blocks(file, buffer, count, self.threads)
                os.fsync(file)
                return Written(time.perf_counter() - begin, count * block)
        finally:
            os.close(file)


def _preallocate(file: int, n_bytes: int) -> None:
    # As ioshape does, and not on the clock. Where a filesystem cannot, a direct file makes the C
    # library's substitute, which writes to every block, fail at once.
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except OSError:
        os.ftruncate(file, n_bytes)


def _write_blocks(file: int, buffer: mmap.mmap, count: int, n_threads: int) -> None:
    """Writes the buffer so many times, one behind the other."""
    turns = itertools.count()  # one step of it is atomic
    stop = threading.Event()
    failures: list[OSError] = []

    def work() -> None:
        while not stop.is_set() and (turn := next(turns)) < count:
            try:
                written = os.pwrite(file, buffer, turn * len(buffer))
            except OSError as error:
                failures.append(error)
                stop.set()
                return
            if written != len(buffer):
                failures.append(OSError(f"{written} bytes of {len(buffer)} were written"))
                stop.set()

    threads = [threading.Thread(target=work) for _ in range(n_threads)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # Ctrl-C: the buffer must outlive the writes
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise CeilingError(str(failures[0]))


_CANDIDATES = (
    Writer(4 * MIB, 4),
    Writer(4 * MIB, 16),
    Writer(4 * MIB, 4, direct=False),
)


def choose(path: Path, n_bytes: int, before_each: Callable[[str], None]) -> Writer:
    """The fastest way to write so much to this path, which is removed again after each try.

    Raises:
        CeilingError: none works.
    """
    speeds: dict[Writer, float] = {}
    problem = CeilingError("nothing was tried")
    for candidate in _CANDIDATES:
        if speeds and not candidate.direct:
            break  # direct writes work here
        before_each(candidate.name)
        try:
            speeds[candidate] = candidate.write(path, n_bytes).gb_per_s
        except CeilingError as error:
            problem = error
        finally:
            path.unlink(missing_ok=True)
    if not speeds:
        raise problem
    return max(speeds, key=lambda writer: speeds[writer])
