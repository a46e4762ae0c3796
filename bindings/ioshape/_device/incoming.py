# SPDX-License-Identifier: Apache-2.0
"""Reads from a file to devices.

Stretches of the file are read into pinned buffers and verified. While one is read, those before it
are being copied to their destinations.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ioshape._device.stream import buffers_of, open_stream, ranks_exchange
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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


# ---- Stretches of a file -------------------------------------------------------------------------
#
# Division of the wanted bytes of a file into stretches, which are read with one call each.

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


# ---- Pieces that ranks send each other -----------------------------------------------------------
#
# Pieces of a file that one rank reads and sends to the others that load the file.
#
# They go through host memory, or from device to device.

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
