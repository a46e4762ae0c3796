# SPDX-License-Identifier: Apache-2.0
"""What ranks that load one file send each other: a piece of it, which one of them has read.

It goes over the CPU's memory, or from device to device.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ioshape._device.incoming import Buffer
    from ioshape._device.stream import CopyStream
    from ioshape._device.stretches import Part

# Whether the piece is there, and checksums: of the part that began in an earlier piece, and of the
# one that goes on in a later one.
_TRAILER = struct.Struct("<B3x2I")
TRAILER_BYTES = _TRAILER.size


class Piece:
    """Memory for one at a time, sent over a group of torch.distributed that knows the CPU."""

    def __init__(self, buffer: Buffer, group: Any = None) -> None:
        self.buffer = buffer
        #: bytes that it has room for
        self.most = buffer.memory.numel() - TRAILER_BYTES
        self._group = group
        self._work: Any = None

    def end(self, n_bytes: int, crcs: list[int] | None) -> None:
        """Says what is sent along: None if there is nothing to be sent."""
        first, last = [*(crcs or []), 0, 0][:2]
        self.buffer.view(n_bytes + TRAILER_BYTES)[n_bytes:] = _TRAILER.pack(
            crcs is not None, first, last
        )

    def send(self, n_bytes: int, root: int, *, is_root: bool) -> None:  # noqa: ARG002
        """Sends for it; all ranks do."""
        self._work = self._group.broadcast(self.buffer.memory[: n_bytes + TRAILER_BYTES], root)

    def wait(self, n_bytes: int) -> tuple[int, int] | None:
        """The checksums, when it is there. None: who should have sent it had none.

        Raises:
            RuntimeError: it did not come.
        """
        self._wait()
        came = self.buffer.view(n_bytes + TRAILER_BYTES)[n_bytes:]
        is_there, first, last = _TRAILER.unpack(came)
        return (first, last) if is_there else None

    def _wait(self) -> None:
        self._work.wait()

    def take(self, n_bytes: int) -> None:
        """In the place of send(), where nobody else wants it."""

    def deliver(self, part: Part) -> None:
        """To where it is wanted."""
        wanted, begin, n_bytes, at = part
        with torch.no_grad():
            wanted.into[begin : begin + n_bytes] = self.buffer.memory[at : at + n_bytes]


class DevicePiece(Piece):
    """Read to pinned memory, copied to the device, and sent from there to other devices.

    All of it is queued on one stream, so that each step comes after the one before.
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

    def deliver(self, part: Part) -> None:
        wanted, begin, n_bytes, at = part
        self._stream.copy(wanted.into[begin : begin + n_bytes], self._there[at : at + n_bytes])
        self.buffer.events.append(self._stream.record())
