# SPDX-License-Identifier: Apache-2.0
"""Read the log of a device's writes, and make images of what a disk may hold after a power failure.

The log has the format of the kernel's dm-log-writes. Its first sector has the number of entries.
Each entry is a sector that describes a write, followed by the data.
"""

import ctypes
import mmap
import os
import random
import struct
from pathlib import Path
from typing import NamedTuple

SECTOR = 512
_MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQI")  # magic, version, entries, bytes of a sector of the log
_ENTRY = struct.Struct("<QQQQ")  # sector, sectors, flags, bytes of data that are not the device's
_FLUSH, _FUA, _DISCARD = 1, 2, 4

#: A disk writes this many bytes as a whole or not at all.
ATOM = 4096

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Entry(NamedTuple):
    """A completed request."""

    offset: int  # on the device
    n_bytes: int
    flags: int
    data: int  # offset in the log

    @property
    def is_flush(self) -> bool:
        """True if all earlier requests are on the disk."""
        return bool(self.flags & _FLUSH)

    @property
    def is_forced(self) -> bool:
        """True if the request itself is on the disk."""
        return bool(self.flags & _FUA)

    @property
    def is_discard(self) -> bool:
        return bool(self.flags & _DISCARD)


def n_entries(log: int) -> int:
    """Return the current number of entries in an open log."""
    head = os.pread(log, _SUPER.size, 0)
    return int(_SUPER.unpack(head)[2]) if len(head) == _SUPER.size else 0


def read_entries(log: mmap.mmap) -> list[Entry]:
    magic, version, count, log_sector = _SUPER.unpack_from(log)
    if (magic, version, log_sector) != (_MAGIC, 1, SECTOR):
        raise ValueError(f"not a log of writes: {magic:x}, version {version}, {log_sector}")
    entries, at = [], SECTOR
    for _ in range(count):
        sector, sectors, flags, _ = _ENTRY.unpack_from(log, at)
        at += SECTOR
        entries.append(Entry(sector * SECTOR, sectors * SECTOR, flags, at))
        if not flags & _DISCARD:
            at += sectors * SECTOR
    return entries


def copy_sparse(source: int, name: Path) -> int:
    """Copy to a new sparse file, and return its open descriptor."""
    size = os.fstat(source).st_size
    copy = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.truncate(copy, size)
    hole = 0
    while hole < size:
        try:
            begin = os.lseek(source, hole, os.SEEK_DATA)
        except OSError:  # no more data
            break
        hole = os.lseek(source, begin, os.SEEK_HOLE)
        while begin < hole:
            begin += os.copy_file_range(source, copy, hole - begin, begin, begin)
    return copy


class Replay:
    """A replay of a log, forward only."""

    def __init__(self, folder: Path, pristine: Path, log: Path) -> None:
        self._image = folder / "image"
        with log.open("rb") as file:
            self._log = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = memoryview(self._log)
        self.entries = read_entries(self._log)
        with pristine.open("rb") as file:
            self._flushed = copy_sparse(file.fileno(), folder / "flushed")
        self._n_flushed = 0  # number of entries in the flushed image

    def close(self) -> None:
        self._data.release()
        self._log.close()
        os.close(self._flushed)

    def _apply(self, image: int, entry: Entry, begin: int = 0, end: int | None = None) -> None:
        if entry.is_discard:
            mode = _PUNCH_HOLE | _KEEP_SIZE
            if _libc.fallocate(image, mode, entry.offset, entry.n_bytes):
                raise OSError(ctypes.get_errno(), "fallocate")
            return
        end = entry.n_bytes if end is None else end
        data = self._data[entry.data + begin : entry.data + end]
        if os.pwrite(image, data, entry.offset + begin) != len(data):
            raise OSError("a short write to an image")

    def _apply_parts(self, image: int, entry: Entry, random_: random.Random) -> None:
        """Apply a random part of an entry, as if power failed during the write."""
        for begin in range(0, 1 if entry.is_discard else entry.n_bytes, ATOM):
            if random_.random() < 0.5:
                self._apply(image, entry, begin, min(begin + ATOM, entry.n_bytes))

    def image(self, prefix: int, way: str, random_: random.Random) -> Path:
        """Return an image after `prefix` entries, which must not decrease from call to call.

        Of the writes after the last flush the disk has "all", "none", "some" entries, or "parts" of
        them.
        """
        flushed = prefix
        while flushed > self._n_flushed and not self.entries[flushed - 1].is_flush:
            flushed -= 1
        for entry in self.entries[self._n_flushed : flushed]:
            self._apply(self._flushed, entry)
        self._n_flushed = flushed
        image = copy_sparse(self._flushed, self._image)
        try:
            kept = random_.choice((0.1, 0.5, 0.9))
            for entry in self.entries[flushed:prefix]:
                if entry.is_forced or way == "all" or (way == "some" and random_.random() < kept):
                    self._apply(image, entry)
                elif way == "parts":
                    self._apply_parts(image, entry, random_)
        finally:
            os.close(image)
        return self._image


def choose_prefixes(
    entries: list[Entry], first: int, known: list[int], count: int, random_: random.Random
) -> list[tuple[int, str]]:
    """Return where power fails, in order, and what happens to writes that were not flushed.

    Places are at entry `first` or later: where saves were acknowledged (`known`), near flushes, and
    anywhere.
    """
    anywhere = range(first, len(entries) + 1)
    flushes = [number for number in anywhere[:-1] if entries[number].is_flush]
    chosen = []
    for _ in range(count):
        near = random_.choice((known, known, flushes, anywhere))
        prefix = random_.choice(near or anywhere) + random_.choice((0, 0, 1, 2, 5))
        way = random_.choice(("none", "none", "all", "some", "parts"))
        chosen.append((min(prefix, len(entries)), way))
    return sorted(chosen)
