# SPDX-License-Identifier: Apache-2.0
"""Compute and compare checksums of files that are processed in parts, in any order."""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left, bisect_right
from hashlib import md5
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ioshape._core.errors import StorageError


def crc32(data: memoryview | bytearray | bytes) -> int:
    """Return the CRC-32 of zlib, several times as fast as zlib does."""
    return int(lib.base_crc32(0, ffi.from_buffer(data), len(data)))


def in_base64(number: int) -> str:
    """Return a CRC-32 as S3 writes it."""
    return b64encode(number.to_bytes(4, "big")).decode()


def md5_of(data: Any) -> bytes:
    """Return the MD5. It only detects accidental damage; security does not depend on it."""
    return md5(data, usedforsecurity=False).digest()


def is_same(told: Mapping[str, Any], data: bytes) -> bool:
    """Return whether an object that was sent in one request has these bytes."""
    known = told.get("ChecksumCRC32")
    if known:
        return bool(known == in_base64(crc32(data)))
    return bool(str(told.get("ETag", "")).strip('"') == md5_of(data).hex())


class Known(NamedTuple):
    """A known checksum of a range of a file."""

    offset: int
    n_bytes: int
    crc32: int
    #: returns the exception to raise if the checksum differs
    damaged: Callable[[], StorageError]


class Sums:
    """The checksums of the parts of one file, which several threads may add."""

    def __init__(self, known: Iterable[Known] = ()) -> None:
        self._known = [one for one in known if one.n_bytes]
        ends = {one.offset + one.n_bytes for one in self._known}
        #: offsets at which a checksum must end, because a known range begins or ends there
        self._cuts = sorted(ends | {one.offset for one in self._known})
        self._pieces: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, data: bytearray | bytes) -> int:
        """Add the bytes at an offset, and return their checksum."""
        end = offset + len(data)
        inner = self._cuts[bisect_right(self._cuts, offset) : bisect_left(self._cuts, end)]
        at, total = offset, 0
        with memoryview(data) as view:
            for cut in (*inner, end):
                piece = crc32(view[at - offset : cut - offset])
                self._pieces[at] = (cut - at, piece)
                total = lib.base_crc32_combine(total, piece, cut - at)
                at = cut
        return int(total)

    def check(self) -> None:
        """Compare the known checksums. All parts must have been added."""
        offsets = sorted(self._pieces)
        for one in self._known:
            first = bisect_left(offsets, one.offset)
            end = bisect_left(offsets, one.offset + one.n_bytes)
            if self._joined(offsets[first:end]) != one.crc32:
                raise one.damaged()

    def whole(self) -> int:
        """Return the checksum of the whole file."""
        return self._joined(sorted(self._pieces))

    def _joined(self, offsets: list[int]) -> int:
        total = 0
        for offset in offsets:
            n_bytes, piece = self._pieces[offset]
            total = lib.base_crc32_combine(total, piece, n_bytes)
        return int(total)
