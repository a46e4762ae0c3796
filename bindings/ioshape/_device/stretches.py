# SPDX-License-Identifier: Apache-2.0
"""What is wanted of a file, cut into what is read with one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

# What has a checksum of its own in our files: pieces end where such a block does.
BLOCK_BYTES = 1 << 20
# What lies between two storages and is read along with them, as headers are.
_GAP_BYTES = 64 << 10


class OpenFile(NamedTuple):
    """Of who reads it by way of the CPU."""

    #: for messages
    path: str
    descriptor: int
    #: where its first byte lies in that
    base: int


class Wanted(NamedTuple):
    """Bytes of a file, and where they are wanted."""

    #: in the file
    offset: int
    #: as bytes, on a device
    into: torch.Tensor
    #: is called before the first of them changes
    begins: Callable[[], object] | None = None
    #: of all of them; None: the reader verifies each piece
    crc32: int | None = None
    #: the error of a checksum that is wrong
    damaged: Callable[[], BaseException] | None = None
    #: by number, of each block of BLOCK_BYTES; None: only the reader knows
    blocks: Any = None


class Part(NamedTuple):
    """Of a stretch, what goes to one place."""

    wanted: Wanted
    #: in what is wanted
    begin: int
    n_bytes: int
    #: in the stretch
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
        self.parts: list[Part] = []

    def add(self, wanted: Wanted, done: int, most: int) -> int:
        """Takes the next bytes of what is wanted, and says how many: 0 if the stretch is over."""
        at = wanted.offset + done - self.begin
        n_bytes = min(wanted.into.numel() - done, most - at)
        if at < 0 or n_bytes <= 0 or at > self.n_bytes + _GAP_BYTES:
            return 0
        if n_bytes < wanted.into.numel() - done:
            # No block is read twice, and a buffer is used up as far as that goes.
            whole = n_bytes // BLOCK_BYTES * BLOCK_BYTES
            if not whole and self.parts:
                return 0
            n_bytes = whole or n_bytes
        self.parts.append(Part(wanted, done, n_bytes, at))
        self.n_bytes = max(self.n_bytes, at + n_bytes)
        return n_bytes

    def cut(self, begin: int, end: int) -> Stretch:
        """These bytes of one that has one part."""
        wanted, first, _n_bytes, _at = self.parts[0]
        same = Stretch(self.begin + begin)
        same.parts = [Part(wanted, first + begin, end - begin, 0)]
        same.n_bytes = end - begin
        return same

    def unverified(self) -> list[Part]:
        """Those of which the reader could not compare the checksum: it belongs to more bytes.

        One began in an earlier stretch, one goes on in a later one; more there are not.
        """
        return [part for part in self.parts if part.wanted.crc32 is not None and not part.is_all]


def stretches(all_wanted: list[Wanted], most: int) -> Iterator[Stretch]:
    """In the order of the file, at most so many bytes each."""
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


def verify(part: Part, crc32: int, crcs: dict[int, int]) -> None:
    """Adds the checksum of a part to those of the parts before it, and compares the last."""
    wanted = part.wanted
    key = id(wanted)
    crcs[key] = int(lib.base_crc32_combine(crcs.get(key, 0), crc32, part.n_bytes))
    if part.is_last and crcs[key] != wanted.crc32 and wanted.damaged is not None:
        raise wanted.damaged()
