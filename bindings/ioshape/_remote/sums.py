# SPDX-License-Identifier: Apache-2.0
"""Checksums of files that are read, sent and fetched in parts, and in any order."""

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
    """As zlib's, and several times as fast."""
    return int(lib.base_crc32(0, ffi.from_buffer(data), len(data)))


def in_base64(number: int) -> str:
    """As S3 has it."""
    return b64encode(number.to_bytes(4, "big")).decode()


def md5_of(data: Any) -> bytes:
    """It finds accidents, as the CRC-32 does; nobody relies on it otherwise."""
    return md5(data, usedforsecurity=False).digest()


def is_same(told: Mapping[str, Any], data: bytes) -> bool:
    """Whether the server has these bytes, as it tells of an object that was sent at once."""
    known = told.get("ChecksumCRC32")
    if known:
        return bool(known == in_base64(crc32(data)))
    return bool(str(told.get("ETag", "")).strip('"') == md5_of(data).hex())


class Known(NamedTuple):
    """A checksum that is known of a range of a file."""

    offset: int
    n_bytes: int
    crc32: int
    #: what is raised if it is another one
    damaged: Callable[[], StorageError]


class Sums:
    """Of one file. Parts may be added by several threads."""

    def __init__(self, known: Iterable[Known] = ()) -> None:
        self._known = [one for one in known if one.n_bytes]
        ends = {one.offset + one.n_bytes for one in self._known}
        #: where a checksum must not go on
        self._cuts = sorted(ends | {one.offset for one in self._known})
        self._pieces: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, data: bytearray | bytes) -> int:
        """What lies there. The checksum of the part."""
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
        """Compares what is known, once all parts are there."""
        places = sorted(self._pieces)
        for one in self._known:
            first = bisect_left(places, one.offset)
            end = bisect_left(places, one.offset + one.n_bytes)
            if self._joined(places[first:end]) != one.crc32:
                raise one.damaged()

    def whole(self) -> int:
        """Of all of the file."""
        return self._joined(sorted(self._pieces))

    def _joined(self, places: list[int]) -> int:
        total = 0
        for place in places:
            n_bytes, piece = self._pieces[place]
            total = lib.base_crc32_combine(total, piece, n_bytes)
        return int(total)
