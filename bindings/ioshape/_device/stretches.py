# SPDX-License-Identifier: Apache-2.0
"""Division of the wanted bytes of a file into stretches, which are read with one call each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

# The unit of checksums in ioshape's files. Pieces end where such a block does.
BLOCK_BYTES = 1 << 20
# A gap of this size between two storages, such as headers, is read along with them.
_GAP_BYTES = 64 << 10


class Wanted(NamedTuple):
    """Bytes of a file, and their destination."""

    #: offset in the file
    offset: int
    #: destination as a tensor of bytes, on any device
    into: torch.Tensor
    #: called before the first byte of the destination changes
    begins: Callable[[], object] | None = None
    #: checksum of all bytes; None: the reader verifies each piece
    crc32: int | None = None
    #: makes the error for a wrong checksum
    damaged: Callable[[], BaseException] | None = None


class Segment(NamedTuple):
    """The bytes of a stretch that go to one destination."""

    wanted: Wanted
    #: offset in the wanted bytes
    begin: int
    n_bytes: int
    #: offset in the stretch
    at: int

    @property
    def is_all(self) -> bool:
        return self.n_bytes == self.wanted.into.numel()

    @property
    def is_last(self) -> bool:
        return self.begin + self.n_bytes == self.wanted.into.numel()


class Stretch:
    """Bytes of a file that are read with one call."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.n_bytes = 0
        self.segments: list[Segment] = []

    def add(self, wanted: Wanted, done: int, most: int) -> int:
        """Add the next wanted bytes. Return their number, which is 0 if the stretch is complete."""
        at = wanted.offset + done - self.begin
        n_bytes = min(wanted.into.numel() - done, most - at)
        if at < 0 or n_bytes <= 0 or at > self.n_bytes + _GAP_BYTES:
            return 0
        if n_bytes < wanted.into.numel() - done:
            # End at a block, so that no block is read twice, and fill the buffer as far as that
            # allows.
            whole = n_bytes // BLOCK_BYTES * BLOCK_BYTES
            if not whole and self.segments:
                return 0
            n_bytes = whole or n_bytes
        self.segments.append(Segment(wanted, done, n_bytes, at))
        self.n_bytes = max(self.n_bytes, at + n_bytes)
        return n_bytes

    def unverified(self) -> list[Segment]:
        """Return the segments that the reader could not verify, because they are pieces of a
        record.

        There are two at most: one that began in an earlier stretch, and one that continues in a
        later one.
        """
        return [
            segment
            for segment in self.segments
            if segment.wanted.crc32 is not None and not segment.is_all
        ]


def stretches(all_wanted: list[Wanted], most: int) -> Iterator[Stretch]:
    """Yield the stretches in the order of the file, with at most `most` bytes each."""
    stretch: Stretch | None = None
    for wanted in sorted(all_wanted, key=lambda one: one.offset):
        done = 0
        while done < wanted.into.numel():
            if stretch is None:
                stretch = Stretch(wanted.offset + done)
            count = stretch.add(wanted, done, most)
            done += count
            if not count:
                yield stretch
                stretch = None
    if stretch is not None:
        yield stretch


def verify(segment: Segment, crc32: int, crcs: dict[int, int]) -> None:
    """Combine the checksum of a segment with those of the segments before it. Compare the last one.

    `crcs` keeps the checksums so far. Raise the error of `wanted.damaged` if they differ.
    """
    wanted = segment.wanted
    key = id(wanted)
    crcs[key] = int(lib.base_crc32_combine(crcs.get(key, 0), crc32, segment.n_bytes))
    if segment.is_last and crcs[key] != wanted.crc32 and wanted.damaged is not None:
        raise wanted.damaged()
