# SPDX-License-Identifier: Apache-2.0
"""The neighbours of a storm: processes that read and write small files, and note how long it took.

A reader opens a file that lies in no cache, reads it and closes it, and has a short rest. A writer
does the same with a file that it writes and syncs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ioshape.cli._children import Line, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READ = "read"
WRITE = "write"

#: a page of every system: what direct reads are made of
_UNIT = 4096
_OVERWRITTEN = 64


@dataclass(frozen=True)
class Habits:
    """What neighbours do."""

    readers: int = 2
    writers: int = 1
    files: int = 256
    file_bytes: int = 16 << 10
    rest_s: float = 0.02


class Operation(NamedTuple):
    """One of a neighbour's, by the clock of now_ns()."""

    kind: str
    at_ns: int
    took_ns: int


def prepare(folder: Path, habits: Habits) -> None:
    """The files that readers read."""
    content = random.randbytes(habits.file_bytes)
    for number in range(habits.files):
        (folder / _name(number)).write_bytes(content)
    sync_filesystem(folder)
    for number in range(habits.files):
        file = os.open(folder / _name(number), os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def sync_filesystem(folder: Path) -> None:
    """Of this filesystem, and no other."""
    file = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(file)
    finally:
        os.close(file)


def _name(number: int) -> str:
    return f"small-{number:05d}"


def reader(folder: Path, habits: Habits, number: int) -> Callable[[Line], None]:
    """What such a process does."""

    def work(line: Line) -> None:
        chance = random.Random(number)
        n_bytes = -(-habits.file_bytes // _UNIT) * _UNIT
        direct = os.O_DIRECT
        with mmap.mmap(-1, n_bytes) as buffer:

            def read() -> None:
                nonlocal direct
                path = folder / _name(chance.randrange(habits.files))
                try:
                    _read(path, buffer, direct)
                except OSError:
                    if not direct:
                        raise
                    direct = 0  # not here
                    _read(path, buffer, direct)

            _live(line, habits, READ, chance, read)

    return work


def _read(path: Path, buffer: mmap.mmap, direct: int) -> None:
    file = os.open(path, os.O_RDONLY | direct)
    try:
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if not os.preadv(file, [buffer], 0):
            raise OSError(f"{path} is empty")
    finally:
        os.close(file)


def writer(folder: Path, habits: Habits, number: int) -> Callable[[Line], None]:
    """The same, for one that writes."""

    def work(line: Line) -> None:
        chance = random.Random(number)
        content = random.randbytes(habits.file_bytes)

        def write() -> None:
            path = folder / f"note-{number}-{chance.randrange(_OVERWRITTEN):02d}"
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(file, content)
                os.fsync(file)
            finally:
                os.close(file)

        _live(line, habits, WRITE, chance, write)

    return work


def _live(
    line: Line, habits: Habits, kind: str, chance: random.Random, operate: Callable[[], None]
) -> None:
    """Operates from each request to the next, which is answered by what it did in between."""
    operate()
    line.say(ready=True)
    for _ in line.requests():
        operations: list[tuple[int, int]] = []
        while True:
            begin = now_ns()
            operate()
            operations.append((begin, now_ns() - begin))
            # Never in step with anybody.
            if line.wait(habits.rest_s * chance.uniform(0.5, 1.5)):
                break
        if line.next() is None:
            return
        line.say(kind=kind, operations=operations)
