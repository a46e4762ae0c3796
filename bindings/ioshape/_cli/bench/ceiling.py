# SPDX-License-Identifier: Apache-2.0
"""How fast a filesystem takes bytes from a program that does nothing else: the ceiling of a save.

Direct writes of large blocks by several threads, and an fsync, with the setting that is the fastest
here.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK_BYTES = 4 << 20
_PAGE_BYTES = 4096


class Writer(NamedTuple):
    """Threads that write blocks from one buffer, past the page cache if that works here."""

    threads: int
    direct: bool = True

    def write(self, path: Path, n_bytes: int) -> float:
        """Makes the file, of whole blocks; the seconds that its bytes took."""
        block = min(_BLOCK_BYTES, -(-n_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        count = -(-n_bytes // block)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if self.direct else 0)
        file = os.open(path, flags, 0o600)
        try:
            if self.direct:
                _preallocate(file, count * block)
            # The buffer begins on a page, as direct writes need, and outlives the threads.
            with mmap.mmap(-1, block) as buffer, ThreadPoolExecutor(self.threads) as pool:
                buffer.write(os.urandom(block))
                begin = time.perf_counter()
                offsets = range(0, count * block, block)
                for written in pool.map(lambda offset: os.pwrite(file, buffer, offset), offsets):
                    if written != block:
                        raise OSError(f"{written} bytes of {block} were written")
                os.fsync(file)
                return time.perf_counter() - begin
        finally:
            os.close(file)


def _preallocate(file: int, n_bytes: int) -> None:
    # As ioshape does, and not on the clock. Where a filesystem cannot, a direct file makes the C
    # library's substitute, which writes to every block, fail at once.
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except OSError:
        os.ftruncate(file, n_bytes)


def choose(path: Path, n_bytes: int) -> Writer:
    """The fastest way to write so much to this path.

    Raises:
        OSError: none works.
    """
    try:
        return min((Writer(4), Writer(16)), key=lambda writer: writer.write(path, n_bytes))
    except OSError:
        buffered = Writer(4, direct=False)
        buffered.write(path, n_bytes)
        return buffered
