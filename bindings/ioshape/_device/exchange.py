# SPDX-License-Identifier: Apache-2.0
"""Pieces of a file that one rank reads and sends to the others that load the file.

They go through host memory, or from device to device.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ioshape._device.incoming import Buffer
    from ioshape._device.stream import CopyStream
    from ioshape._device.stretches import Segment

# A flag that says whether the piece was read, and two checksums. The first is of the segment that
# began in an earlier piece, and the second is of the segment that continues in a later one.
_TRAILER = struct.Struct("<B3x2I")
TRAILER_BYTES = _TRAILER.size


class Piece:
    """A buffer for one piece at a time, sent over a gloo group of torch.distributed."""

    def __init__(self, buffer: Buffer, group: Any = None) -> None:
        self.buffer = buffer
        #: the most bytes of a piece
        self.most = buffer.memory.numel() - TRAILER_BYTES
        self._group = group
        self._work: Any = None

    def end(self, n_bytes: int, crcs: list[int] | None) -> None:
        """Write the trailer behind the piece. `crcs` is None if this rank failed to read it."""
        first, last = [*(crcs or []), 0, 0][:2]
        self.buffer.view(n_bytes + TRAILER_BYTES)[n_bytes:] = _TRAILER.pack(
            crcs is not None, first, last
        )

    def send(self, n_bytes: int, root: int, *, is_root: bool) -> None:  # noqa: ARG002
        """Start the transfer of a piece. All ranks call this, and `root` sends."""
        self._work = self._group.broadcast(self.buffer.memory[: n_bytes + TRAILER_BYTES], root)

    def wait(self, n_bytes: int) -> tuple[int, int] | None:
        """Wait for the piece, and return its checksums; None if the sender could not read it.

        Raises:
            RuntimeError: The transfer failed.
        """
        self._wait()
        came = self.buffer.view(n_bytes + TRAILER_BYTES)[n_bytes:]
        is_there, first, last = _TRAILER.unpack(came)
        return (first, last) if is_there else None

    def _wait(self) -> None:
        self._work.wait()

    def take(self, n_bytes: int) -> None:
        """Prepare a piece that this rank has read for itself, without send(), for deliver()."""

    def deliver(self, segment: Segment) -> None:
        """Copy a segment of the piece to its destination."""
        wanted, begin, n_bytes, at = segment
        with torch.no_grad():
            wanted.into[begin : begin + n_bytes] = self.buffer.memory[at : at + n_bytes]


class DevicePiece(Piece):
    """A piece that is read into pinned memory, copied to the device and sent to other devices.

    All steps are queued on one stream, so each runs after the one before.
    """

    def __init__(self, buffer: Buffer, stream: CopyStream, device: torch.device) -> None:
        super().__init__(buffer)
        self._stream = stream
        self._there = torch.empty_like(buffer.memory, device=device)

    def send(self, n_bytes: int, root: int, *, is_root: bool) -> None:
        end = n_bytes + TRAILER_BYTES
        here, there = self.buffer.memory[:end], self._there[:end]
        if is_root:
            self._stream.copy(there, here)
        self._stream.broadcast(there, root)
        if not is_root:
            self._stream.copy(here[n_bytes:], there[n_bytes:])
        self.buffer.events.append(self._stream.record())

    def _wait(self) -> None:
        self.buffer.wait()

    def take(self, n_bytes: int) -> None:
        self._stream.copy(self._there[:n_bytes], self.buffer.memory[:n_bytes])
        self.buffer.events.append(self._stream.record())

    def deliver(self, segment: Segment) -> None:
        wanted, begin, n_bytes, at = segment
        self._stream.copy(wanted.into[begin : begin + n_bytes], self._there[at : at + n_bytes])
        self.buffer.events.append(self._stream.record())
