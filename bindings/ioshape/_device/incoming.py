# SPDX-License-Identifier: Apache-2.0
"""Reads from a file to devices.

Stretches of the file are read into pinned buffers and verified. While one is read, those before it
are being copied to their destinations.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from ioshape._device.exchange import DevicePiece
from ioshape._device.stream import buffers_of, open_stream, ranks_exchange
from ioshape._device.stretches import Stretch, Wanted, stretches, verify
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._device.exchange import Piece
    from ioshape._device.stream import CopyEvent, CopyStream


class Buffer:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        #: events behind the copies that read this buffer
        self.events: list[CopyEvent] = []

    def wait(self) -> None:
        """Wait until no copy reads this buffer."""
        while self.events:
            self.events.pop().synchronize()

    def view(self, n_bytes: int) -> memoryview:
        return memoryview(ffi.buffer(ffi.cast("char *", self.memory.data_ptr()), n_bytes))

    def crc32(self, begin: int, n_bytes: int) -> int:
        at = ffi.cast("char *", self.memory.data_ptr() + begin)
        return int(lib.base_crc32(0, at, n_bytes))


class Incoming:
    """The bytes of a file that are wanted on devices; `n_bytes` is an upper bound of their size."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._buffers: list[Buffer] = []
        self._wanted: list[Wanted] = []

    def takes(self, device: torch.device) -> bool:
        """Return whether this is a device to which pinned memory can be copied."""
        if device not in self._streams:
            try:
                stream = self._streams[device] = open_stream(device)
                if not self._buffers:
                    self._buffers = [*map(Buffer, buffers_of(stream, self._n_bytes))]
            except RuntimeError:
                self._streams[device] = None
        return self._streams[device] is not None

    def add(self, wanted: Wanted) -> None:
        """Add a request. takes() must be true for its device."""
        self._wanted.append(wanted)

    def wanted(self) -> list[Wanted]:
        """Return the requests that were added, in their order."""
        return list(self._wanted)

    def pieces(self) -> list[Piece]:
        """Return buffers to exchange pieces with other ranks; [] if the devices cannot do that."""
        devices = {one.into.device for one in self._wanted}
        if len(devices) != 1 or not self._buffers or not ranks_exchange(device := devices.pop()):
            return []
        stream = self._streams[device]
        assert stream is not None
        try:
            with torch.inference_mode(mode=False):
                return [DevicePiece(buffer, stream, device) for buffer in self._buffers]
        except RuntimeError:
            return []  # the device has no memory left

    def bring(
        self,
        read: Callable[[int, memoryview], object],
        *,
        exchange: Callable[[], None] | None = None,
    ) -> None:
        """Read everything that was added. read(offset, into) reads and verifies bytes of the file.

        If `exchange` is given, it is called instead, and reads everything in the buffers of
        pieces().
        """
        wanted, self._wanted = self._wanted, []
        if not wanted or not self._buffers:
            return  # without buffers, everything that is wanted is empty
        for device in {one.into.device for one in wanted}:
            stream = self._streams[device]
            assert stream is not None
            # Earlier work of the caller on the memory may not have finished yet.
            stream.wait_for_caller()
        try:
            if exchange is not None:
                exchange()
                for buffer in self._buffers:
                    buffer.wait()
            else:
                self._by_cpu(read, stretches(wanted, self._buffers[0].memory.numel()))
        finally:
            # Even after a failure, no copy may write to the destinations when this returns.
            self._abandon()

    def _by_cpu(self, read: Callable[[int, memoryview], object], each: Iterable[Stretch]) -> None:
        crcs: dict[int, int] = {}
        buffers = itertools.cycle(self._buffers)
        for stretch in each:
            buffer = next(buffers)
            buffer.wait()
            read(stretch.begin, buffer.view(stretch.n_bytes))
            for segment in stretch.unverified():
                verify(segment, buffer.crc32(segment.at, segment.n_bytes), crcs)
            self._copy(stretch, buffer)
        for buffer in self._buffers:
            buffer.wait()

    def _copy(self, stretch: Stretch, buffer: Buffer) -> None:
        used: dict[torch.device, CopyStream] = {}
        try:
            for wanted, begin, n_bytes, at in stretch.segments:
                if not begin and wanted.begins is not None:
                    wanted.begins()
                stream = self._streams[wanted.into.device]
                assert stream is not None
                used[wanted.into.device] = stream
                stream.copy(wanted.into[begin : begin + n_bytes], buffer.memory[at : at + n_bytes])
        finally:
            buffer.events += [stream.record() for stream in used.values()]

    def _abandon(self) -> None:
        for buffer in self._buffers:
            try:
                buffer.wait()
            except RuntimeError:
                # The device has failed. Its first error is being raised already.
                buffer.events.clear()
