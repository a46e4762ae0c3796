# SPDX-License-Identifier: Apache-2.0
"""The neighbours of a storm: processes that read and write small files and time each operation.

A reader opens a file that no cache holds, reads it, closes it, and rests. A writer
creates such a file and syncs it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from typing import TYPE_CHECKING, NamedTuple

from ioshape._cli.bench.crowd import by_the_clock, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

READ = "read"
WRITE = "write"

# Many that rest for long: a single one that never rests would wait for its slow operations, and
# hardly ever meet them.
READERS = 8
WRITERS = 2
_REST_S = 0.1
_FILES = 256
_FILE_BYTES = 16 << 10
_KEPT = 64


class Operation(NamedTuple):
    """One of a neighbour's, by the clock of now_ns()."""

    kind: str
    at_ns: int
    took_ns: int


def prepare(folder: Path) -> None:
    """Makes the files that readers read."""
    content = random.randbytes(_FILE_BYTES)
    for number in range(_FILES):
        _small(folder, number).write_bytes(content)
    sync_filesystem(folder)


def sync_filesystem(folder: Path) -> None:
    """This filesystem, and no other."""
    file = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(file)
    finally:
        os.close(file)


def _small(folder: Path, number: int) -> Path:
    return folder / f"small-{number:05d}"


def reader(folder: Path, number: int) -> Callable[[Connection], None]:
    """What such a process does."""

    def work(connection: Connection) -> None:
        chance = random.Random(number)
        with mmap.mmap(-1, _FILE_BYTES) as buffer:
            _live(
                connection,
                READ,
                chance,
                lambda: _read(_small(folder, chance.randrange(_FILES)), buffer),
            )

    return work


def _read(path: Path, buffer: mmap.mmap) -> None:
    for flags in (os.O_DIRECT, 0):  # not every filesystem has direct reads
        try:
            _read_with(path, buffer, flags)
            return
        except OSError:
            if not flags:
                raise


def _read_with(path: Path, buffer: mmap.mmap, flags: int) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [buffer], 0)
    finally:
        os.close(file)


def writer(folder: Path, number: int) -> Callable[[Connection], None]:
    """Return the work of a process that creates small files, and removes older ones."""

    def work(connection: Connection) -> None:
        chance = random.Random(number)
        content = random.randbytes(_FILE_BYTES)

        def write() -> None:
            path = folder / f"note-{number}-{chance.randrange(_KEPT):02d}"
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(file, content)
                os.fsync(file)
            finally:
                os.close(file)

        _live(connection, WRITE, chance, write)

    return work


def _live(
    connection: Connection, kind: str, chance: random.Random, operate: Callable[[], None]
) -> None:
    """Operates from one message to the next, and answers with what it did in between."""
    operate()
    connection.send("ready")
    while True:
        connection.recv()
        operations: list[Operation] = []
        while True:
            begin = now_ns()
            operate()
            operations.append(Operation(kind, begin, now_ns() - begin))
            # The rests differ, so that neighbours never run in step.
            if connection.poll(by_the_clock(_REST_S * chance.uniform(0.5, 1.5))):
                break
        connection.recv()
        connection.send(operations)
