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

    from ioshape._errors import StorageError


def crc32(data: memoryview | bytearray | bytes) -> int:
    """As zlib's, and several times as fast."""
    return int(lib.base_crc32(0, ffi.from_buffer(data), len(data)))


def in_base64(number: int) -> str:
    """As S3 has it."""
    return b64encode(number.to_bytes(4, "big")).decode()


def md5_of(data: Any) -> bytes:
    """It finds accidents, as the CRC-32 does; nobody relies on it otherwise."""
    return md5(data, usedforsecurity=False).digest()


def is_etag(told: Mapping[str, Any], md5: bytes) -> bool:
    """Whether that MD5 is what a server calls a part, or an object sent at once."""
    return bool(str(told.get("ETag", "")).strip('"') == md5.hex())


def is_same(told: Mapping[str, Any], data: bytearray | bytes, sum_: int) -> bool:
    """Whether the server has these bytes, as it tells of a part or of an object sent at once."""
    known = told.get("ChecksumCRC32")
    if known:
        return bool(known == in_base64(sum_))
    return is_etag(told, md5_of(data))


class Known(NamedTuple):
    """A checksum that is known of a range of a file."""

    offset: int
    n_bytes: int
    crc32: int
    #: what is raised if it is another one
    damaged: Callable[[], StorageError]


class Sums:
    """Of one file. Parts may be added by several threads."""

    def __init__(self, known: Iterable[Known] = (), *, with_md5s: bool = False) -> None:
        """With MD5s of the parts, for a server that knows nothing else."""
        self._known = [one for one in known if one.n_bytes]
        ends = {one.offset + one.n_bytes for one in self._known}
        #: where a checksum must not go on
        self._cuts = sorted(ends | {one.offset for one in self._known})
        self._pieces: dict[int, tuple[int, int]] = {}
        #: of each part
        self._parts: dict[int, int] = {}
        self._md5s: dict[int, bytes] | None = {} if with_md5s else None

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
        self._parts[offset] = total
        if self._md5s is not None:
            self._md5s[offset] = md5_of(data)
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

    def is_told(self, told: Mapping[str, Any]) -> bool:
        """Whether the server has this file, as it tells of an object that was sent in parts."""
        known = str(told.get("ChecksumCRC32") or "")
        if self._md5s is not None:
            parts = b"".join(one for _offset, one in sorted(self._md5s.items()))
            return (
                str(told.get("ETag", "")).strip('"') == f"{md5_of(parts).hex()}-{len(self._md5s)}"
            )
        if "-" not in known:
            return known == in_base64(self.whole())
        # Of the checksums of its parts: a server that knows no other for objects in parts.
        parts = b"".join(one.to_bytes(4, "big") for _offset, one in sorted(self._parts.items()))
        return known == f"{in_base64(crc32(parts))}-{len(self._parts)}"
