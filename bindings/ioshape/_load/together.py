# SPDX-License-Identifier: Apache-2.0
"""load(shared=True): one read of a file for ranks on several nodes, or with a device each.

The file is read in pieces. The ranks take turns: one reads a piece and sends it to the others.
Pieces go over the group of torch.distributed that save_group() uses, or from device to device. So
the storage serves each piece once, whatever the number of nodes. Every rank reads small data, such
as the pickle, for itself.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ioshape._core import comm as _comm
from ioshape._core.job import job
from ioshape._core.log import logger
from ioshape._device.incoming import TRAILER_BYTES, Buffer, Piece, stretches, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._device.incoming import Stretch, Wanted

# Large enough for the network, and for the storage when a single rank reads.
PIECE_BYTES = 16 << 20
# the most pieces in flight ahead of the next one that is needed
_DEPTH = 4
_DIGEST_BYTES = 16
# the seconds until all ranks must have come
_MOST_WAIT_S = 120.0


class Together:
    """The exchange of pieces between all ranks of a job.

    All ranks make the same calls in the same order. A rank that leaves early lets the others
    continue alone.
    """

    def __init__(self, group: Any, rank: int, size: int, node: str) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._node = node
        self._has_met = False
        #: the first failure of this rank, after which it sends no data; None if there is none
        self._failure: BaseException | None = None

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the exchange, so that no rank waits for one that failed or loads in another way."""
        if not self._has_met:
            self._meet(bytes(_DIGEST_BYTES))

    def wants_the_same(
        self, wanted: Iterable[Wanted], file_bytes: int, *, on_devices: bool = False
    ) -> bool:
        """Return whether all ranks want the same bytes of an equal file, and gain by sending them.

        They gain if they are on several nodes. On one node the page cache serves all of them. They
        also gain if each has a device: each byte is then verified once and crosses host memory
        once. Only the first call asks the other ranks; any later call returns False, because other
        ranks may not make it.
        """
        if self._has_met:
            return False
        told = hashlib.blake2b(f"{file_bytes} {on_devices}".encode(), digest_size=_DIGEST_BYTES)
        for one in wanted:
            told.update(f" {one.offset} {one.into.numel()} {one.crc32}".encode())
        n_nodes = self._meet(told.digest())
        return n_nodes > 1 or (n_nodes > 0 and on_devices)

    def _meet(self, digest: bytes) -> int:
        """Return the number of nodes of the ranks; 0 if the ranks want different things."""
        self._has_met = True
        node = hashlib.blake2b(self._node.encode(), digest_size=_DIGEST_BYTES).digest()
        own = torch.frombuffer(bytearray(digest + node), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self._size)]
        try:
            self._group.allgather([found], [own]).wait()
        except RuntimeError as error:
            _warn(f"not all ranks have joined ({error})")
            return 0
        told = [bytes(one.tolist()) for one in found]
        digests = {one[:_DIGEST_BYTES] for one in told}
        return len(set(told)) if digests == {digest} and any(digest) else 0

    def pieces(self) -> list[Piece]:
        """Return buffers for pieces on the CPU."""
        with torch.inference_mode(mode=False):
            n_bytes = PIECE_BYTES + TRAILER_BYTES
            memory = [torch.empty(n_bytes, dtype=torch.uint8, device="cpu") for _ in range(_DEPTH)]
        return [Piece(Buffer(one), self._group) for one in memory]

    def bring(
        self,
        wanted: list[Wanted],
        pieces: list[Piece],
        read: Callable[[int, memoryview], object],
        tell: Callable[[int], object],
    ) -> None:
        """Deliver all wanted bytes. read(offset, into) reads bytes of the file.

        tell(offset) is called with the offset in the file up to which bytes have been delivered.
        """
        free = list(pieces)
        left = deque(enumerate(stretches(wanted, free[0].most)))
        under_way: deque[tuple[Stretch, Piece]] = deque()
        alone: list[Stretch] = []
        crcs: dict[int, int] = {}
        # All ranks start the transfer of the same pieces before they wait for one. So all of them
        # notice a missing piece at the same position.
        while under_way or (left and not alone):
            while free and left and not alone:
                number, stretch = left.popleft()
                under_way.append((stretch, free.pop()))
                self._send(number, *under_way[-1], read)
            stretch, piece = under_way.popleft()
            came = _has_come(stretch, piece)
            # Checksums continue from piece to piece, so no piece may be delivered before a missing
            # one.
            if came is None or alone:
                alone.append(stretch)
            elif self._failure is None:
                # An exception here would leave the others waiting. So this rank continues until
                # they know.
                try:
                    _deliver(stretch, piece, came, crcs)
                    tell(stretch.begin + stretch.n_bytes)
                except BaseException as error:
                    self._failure = error
            free.append(piece)
        if self._failure is not None:
            raise self._failure
        for stretch in [*alone, *(stretch for _, stretch in left)]:
            piece = free[0]
            piece.buffer.wait()
            read(stretch.begin, piece.buffer.view(stretch.n_bytes))
            piece.take(stretch.n_bytes)
            _deliver(stretch, piece, _sums(stretch, piece), crcs)

    def _send(
        self,
        number: int,
        stretch: Stretch,
        piece: Piece,
        read: Callable[[int, memoryview], object],
    ) -> None:
        reader = number % self._size
        if reader == self._rank:
            sums: list[int] | None = None
            if self._failure is None:
                try:
                    read(stretch.begin, piece.buffer.view(stretch.n_bytes))
                    sums = _sums(stretch, piece)
                except BaseException as error:
                    self._failure = error
            piece.end(stretch.n_bytes, sums)
        piece.send(stretch.n_bytes, reader, is_root=reader == self._rank)


def _has_come(stretch: Stretch, piece: Piece) -> tuple[int, int] | None:
    try:
        return piece.wait(stretch.n_bytes)
    except RuntimeError as error:
        _warn(f"a rank has ended ({error})")
        return None


def _sums(stretch: Stretch, piece: Piece) -> list[int]:
    """Return the checksums of the segments that the reader could not verify in pieces."""
    return [piece.buffer.crc32(segment.at, segment.n_bytes) for segment in stretch.unverified()]


def _deliver(stretch: Stretch, piece: Piece, sums: Iterable[int], crcs: dict[int, int]) -> None:
    for segment, crc32 in zip(stretch.unverified(), sums, strict=False):
        verify(segment, crc32, crcs)
    for segment in stretch.segments:
        if not segment.begin and segment.wanted.begins is not None:
            segment.wanted.begins()
        piece.deliver(segment)


def _warn(why: str) -> None:
    logger().warning("loading without the other ranks: %s", why)


def all_ranks() -> Together | None:
    """Return the exchange of all ranks of the job.

    Return None if there are no other ranks, or if they cannot be reached.

    Raises:
        ValueError: torch.distributed is not initialised, or has no gloo.
    """
    this_job = job()
    if this_job.world_size == 1:
        return None
    try:
        found = _comm.of_torch(_MOST_WAIT_S)
    except RuntimeError as error:
        _warn(f"torch.distributed cannot connect them ({error})")
        return None
    if found is None:
        raise ValueError(
            "shared=True sends what one rank reads to the others: call "
            "torch.distributed.init_process_group() first, with a torch that has gloo"
        )
    return Together(found.process_group, this_job.rank, this_job.world_size, this_job.node)
