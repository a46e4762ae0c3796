# SPDX-License-Identifier: Apache-2.0
"""How fast a filesystem takes bytes from a program that does nothing else: the ceiling of a save.

Direct writes of large blocks, many in flight, and an fsync: by fio, where it is installed, and by
threads of our own. Whichever is the fastest here, with the setting that is the fastest here.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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


class Writer(Protocol):
    """A way to write."""

    @property
    def name(self) -> str:
        """For the table."""

    def write(self, path: Path, n_bytes: int) -> Written:
        """Writes that much, or a little less, and syncs."""


def _block_for(n_bytes: int, wanted: int) -> int:
    """A block that fits into the file: a power of two."""
    return min(wanted, max(_PAGE, 1 << (n_bytes.bit_length() - 1)))


@dataclass(frozen=True)
class Fio:
    """fio. Its own clock counts: from the first request to the end of the fsync."""

    engine: str
    block_bytes: int
    depth: int

    @property
    def name(self) -> str:
        return f"fio {self.engine} {self.block_bytes // MIB}M x {self.depth}"

    def write(self, path: Path, n_bytes: int) -> Written:
        block = _block_for(n_bytes, self.block_bytes)
        size = n_bytes // block * block
        arguments = {
            "name": "ceiling",
            "filename": path.name,  # below cwd: fio gives colons in paths a meaning
            "rw": "write",
            "direct": 1,
            "ioengine": self.engine,
            "bs": block,
            "iodepth": self.depth,
            "size": size,
            "end_fsync": 1,
            "output-format": "json",
        }
        if self.engine == "io_uring":
            arguments |= {"fixedbufs": 1, "registerfiles": 1}
        part = _run_fio([f"--{name}={value}" for name, value in arguments.items()], path.parent)
        if part["io_bytes"] != size:
            raise CeilingError(f"fio wrote {part['io_bytes']} bytes of {size}")
        return Written(size / part["bw_bytes"], size)


def _run_fio(arguments: list[str], folder: Path) -> dict[str, int]:
    """What it says about its writes."""
    try:
        done = subprocess.run(
            ["fio", *arguments],
            cwd=folder,
            # Memory in huge pages, as ours is. Without, large requests fall into small pieces.
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        # Notices may stand before the JSON.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        part = {name: int(job["write"][name]) for name in ("io_bytes", "bw_bytes")}
    except (OSError, subprocess.CalledProcessError) as error:
        raise CeilingError(str(error)) from None
    except (ValueError, LookupError, TypeError) as error:
        raise CeilingError(f"fio's answer is not understood: {error!r}") from None
    if job.get("error") or part["bw_bytes"] <= 0:
        raise CeilingError(f"fio reports error {job.get('error')}")
    return part


@dataclass(frozen=True)
class Threads:
    """Threads that write blocks from one buffer, past the page cache if that is allowed."""

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
    # As fio and we do, and not on the clock. Where a filesystem cannot, a direct file makes the C
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


def _candidates() -> Iterable[Writer]:
    if shutil.which("fio"):
        yield Fio("io_uring", 4 * MIB, 16)
        yield Fio("io_uring", 1 * MIB, 32)
        yield Fio("libaio", 4 * MIB, 16)
    yield Threads(4 * MIB, 4)
    yield Threads(4 * MIB, 16)


def choose(path: Path, n_bytes: int, before_each: Callable[[str], None]) -> Writer:
    """The fastest way to write so much to this path, which is removed again after each try.

    Raises:
        CeilingError: none works.
    """
    speeds: dict[Writer, float] = {}
    problem = CeilingError("nothing was tried")
    for candidate in itertools.chain(_candidates(), [Threads(4 * MIB, 4, direct=False)]):
        if speeds and isinstance(candidate, Threads) and not candidate.direct:
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
