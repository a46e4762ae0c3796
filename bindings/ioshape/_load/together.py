# SPDX-License-Identifier: Apache-2.0
"""load(shared=True): ranks on several nodes that want one file.

Its bytes are read in pieces, each by one rank, in turns, and sent to the others over the group of
torch.distributed that save_group() uses. So the storage is asked for each of them once, whatever
the number of nodes. What is small, such as the pickle, every rank reads.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ioshape._device.incoming import Buffer, stretches, verify
from ioshape._group import comm as _comm
from ioshape._settings.job import job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._device.incoming import Stretch, Wanted

# Large enough for a network, and for the storage, where one rank reads it.
PIECE_BYTES = 16 << 20
# Sent for ahead of the one that is needed next.
_DEPTH = 4
_DIGEST_BYTES = 16
# Until all ranks have come.
_PATIENCE_S = 120.0


class Together:
    """All ranks go through the same with it; one that leaves early lets the others go on alone."""

    def __init__(self, group: Any, rank: int, size: int, node: str) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._node = node
        self._has_met = False
        #: after it this rank sends nothing any more
        self._failure: BaseException | None = None

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody waits for a rank that has failed, or goes another way."""
        if not self._has_met:
            self._meet(bytes(_DIGEST_BYTES))

    def wants_the_same(self, wanted: Iterable[Wanted], file_bytes: int) -> bool:
        """Whether all ranks want these bytes of such a file, and are on several nodes.

        On one node the page cache gives them to all. The answer to a second question is no: others
        may not have one.
        """
        if self._has_met:
            return False
        told = hashlib.blake2b(str(file_bytes).encode(), digest_size=_DIGEST_BYTES)
        for one in wanted:
            told.update(f" {one.offset} {one.into.numel()} {one.crc32}".encode())
        return self._meet(told.digest())

    def _meet(self, digest: bytes) -> bool:
        self._has_met = True
        node = hashlib.blake2b(self._node.encode(), digest_size=_DIGEST_BYTES).digest()
        own = torch.frombuffer(bytearray(digest + node), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self._size)]
        try:
            self._group.allgather([found], [own]).wait()
        except RuntimeError as error:
            _warn(f"not all ranks have come ({error})")
            return False
        told = [bytes(one.tolist()) for one in found]
        digests = {one[:_DIGEST_BYTES] for one in told}
        return digests == {digest} and any(digest) and len(set(told)) > 1

    def bring(
        self,
        wanted: list[Wanted],
        read: Callable[[int, memoryview], object],
        tell: Callable[[int], object],
    ) -> None:
        """Brings all of it, which is on the CPU. read(offset, into) reads bytes of the file.

        tell(offset) hears how far it has come.
        """
        with torch.inference_mode(mode=False):
            free = [Buffer(torch.empty(PIECE_BYTES + 1, dtype=torch.uint8)) for _ in range(_DEPTH)]
        left = deque(enumerate(stretches(wanted, PIECE_BYTES)))
        under_way: deque[tuple[Stretch, Buffer, Any]] = deque()
        alone: list[Stretch] = []
        crcs: dict[int, int] = {}
        # All ranks send for the same pieces before they look at the same one. So all of them are
        # at the same place when something is missing.
        while under_way or (left and not alone):
            while free and left and not alone:
                number, piece = left.popleft()
                buffer = free.pop()
                under_way.append((piece, buffer, self._send(number, piece, buffer, read)))
            piece, buffer, work = under_way.popleft()
            # Checksums go on from piece to piece: none may come before one that is missing.
            if not self._has_come(piece, buffer, work) or alone:
                alone.append(piece)
            elif self._failure is None:
                # Who raised here would be missing: it goes on until the others know.
                try:
                    _deliver(piece, buffer, crcs)
                    tell(piece.begin + piece.n_bytes)
                except BaseException as error:
                    self._failure = error
            free.append(buffer)
        if self._failure is not None:
            raise self._failure
        for piece in [*alone, *(piece for _, piece in left)]:
            read(piece.begin, free[0].view(piece.n_bytes))
            _deliver(piece, free[0], crcs)

    def _send(
        self,
        number: int,
        piece: Stretch,
        buffer: Buffer,
        read: Callable[[int, memoryview], object],
    ) -> Any:
        """The byte behind a piece says whether it is one."""
        reader = number % self._size
        if reader == self._rank:
            buffer.memory[piece.n_bytes] = 0
            if self._failure is None:
                try:
                    read(piece.begin, buffer.view(piece.n_bytes))
                    buffer.memory[piece.n_bytes] = 1
                except BaseException as error:
                    self._failure = error
        return self._group.broadcast(buffer.memory[: piece.n_bytes + 1], reader)

    def _has_come(self, piece: Stretch, buffer: Buffer, work: Any) -> bool:
        try:
            work.wait()
        except RuntimeError as error:
            _warn(f"a rank is gone ({error})")
            return False
        return bool(buffer.memory[piece.n_bytes])


def _deliver(piece: Stretch, buffer: Buffer, crcs: dict[int, int]) -> None:
    for part in piece.parts:
        verify(part, buffer, crcs)
        wanted, begin, n_bytes, at = part
        if not begin and wanted.begins is not None:
            wanted.begins()
        with torch.no_grad():
            wanted.into[begin : begin + n_bytes] = buffer.memory[at : at + n_bytes]


def _warn(why: str) -> None:
    logging.getLogger("ioshape").warning("loads without the other ranks: %s", why)


def all_ranks() -> Together | None:
    """All ranks of the job; None if there are no others, or none that can be reached.

    Raises:
        ValueError: they cannot send each other anything.
    """
    place = job()
    if place.world_size == 1:
        return None
    try:
        found = _comm.of_torch(_PATIENCE_S)
    except RuntimeError as error:
        _warn(f"torch.distributed cannot connect them ({error})")
        return None
    if found is None:
        raise ValueError(
            "shared=True sends what one rank reads to the others: call "
            "torch.distributed.init_process_group() before, with a torch that has gloo"
        )
    # Tests put several nodes on one host.
    node = os.environ.get("IOSHAPE_TEST_NODE") or place.node
    return Together(found.process_group, place.rank, place.world_size, node)
