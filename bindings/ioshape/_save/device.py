# SPDX-License-Identifier: Apache-2.0
"""Storages of a GPU, brought to staging memory through pinned memory, overlapped.

The library asks for the bytes of a storage in order, piece by piece, into staging memory. While one
piece is copied there from a pinned buffer, the next is on its way to the other one, on a stream of
its own that begins where the caller's stream is now.
"""

from __future__ import annotations

from typing import Any

import torch

from ioshape._c import called_from_c, keep_failure
from ioshape._native import ffi, lib

PIECE_BYTES = 16 << 20
_BUFFERS = 3


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of bytes, on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pinned:
    """A pinned buffer, and the event that says when what was sent to it has arrived."""

    def __init__(self, device: torch.device, size: int) -> None:
        # Memory that is pinned is kept by torch for the next save.
        self.memory = torch.empty(
            size, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu"
        )
        self.event: Any = None
        self.n_bytes = 0


class Courier:
    """Fetches one storage. Make it where the storage is valid: on the caller's stream."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._source: torch.Tensor | None = bytes_of(storage)
        self._n_bytes = storage.nbytes()
        self._device = storage.device
        self._sent = 0  # bytes that are on their way or here
        self._taken = 0
        self._buffers: list[_Pinned] = []
        self._waiting: list[_Pinned] = []  # sent and not used up, oldest first
        self._used = 0  # bytes of the oldest that were taken
        self._stream: Any = None
        self.failure: BaseException | None = None
        if self._device.type != "cpu":
            # After all that the caller's stream has been asked to do to the storage.
            self._stream = torch.Stream(self._device)
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def _begin(self) -> None:
        size = min(PIECE_BYTES, self._n_bytes)
        self._buffers = [_Pinned(self._device, size) for _ in range(_BUFFERS)]

    def _send(self) -> None:
        """Sends for the next pieces as long as there is a buffer."""
        while self._source is not None and self._buffers and self._sent < self._n_bytes:
            buffer = self._buffers.pop()
            piece = self._source[self._sent : self._sent + buffer.memory.numel()]
            buffer.n_bytes = piece.numel()
            if self._stream is None:
                buffer.memory[: buffer.n_bytes].copy_(piece)
            else:
                with self._stream:
                    buffer.memory[: buffer.n_bytes].copy_(piece, non_blocking=True)
                    buffer.event = self._stream.record_event()
            self._sent += buffer.n_bytes
            self._waiting.append(buffer)

    def fetch(self, offset: int, into: Any, n_bytes: int) -> None:
        """Brings bytes [offset, offset + n_bytes), which continue those of the last call."""
        if offset != self._taken:
            raise RuntimeError(f"bytes {offset} asked for, {self._taken} expected")
        if not self._taken:
            self._begin()
        target = torch.frombuffer(ffi.buffer(into, n_bytes), dtype=torch.uint8)
        done = 0
        while done < n_bytes:
            self._send()
            buffer = self._waiting[0]
            if buffer.event is not None and self._used == 0:
                buffer.event.synchronize()
            count = min(n_bytes - done, buffer.n_bytes - self._used)
            # torch copies with several threads, and without the GIL.
            target[done : done + count].copy_(buffer.memory[self._used : self._used + count])
            done += count
            self._used += count
            if self._used == buffer.n_bytes:
                self._waiting.pop(0)
                self._used = 0
                self._buffers.append(buffer)
        self._taken += n_bytes
        if self._taken == self._n_bytes:
            # Nothing more will be asked for: the storage is its owner's alone again.
            self._buffers.clear()
            self._source = None
            self._stream = None


@called_from_c(error=-5, onerror=keep_failure)
def ioshape_py_fetch(courier: Courier, offset: int, into: Any, n_bytes: int) -> int:
    courier.fetch(offset, into, n_bytes)
    return 0


FETCH = lib.ioshape_py_fetch
