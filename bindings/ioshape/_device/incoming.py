# SPDX-License-Identifier: Apache-2.0
"""From a file to devices.

Stretches of the file are read, and verified, into pinned buffers. While one is read, what has come
before is on its way to where it is wanted.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from ioshape._device.exchange import DevicePiece
from ioshape._device.stream import buffers_of, open_stream, ranks_exchange
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._device.exchange import Piece
    from ioshape._device.stream import CopyEvent, CopyStream

# What has a checksum of its own in our files: pieces end where such a block does.
_BLOCK_BYTES = 1 << 20
# What lies between two storages and is read along with them, as headers are.
_GAP_BYTES = 64 << 10


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
            whole = n_bytes // _BLOCK_BYTES * _BLOCK_BYTES
            if not whole and self.parts:
                return 0
            n_bytes = whole or n_bytes
        self.parts.append(Part(wanted, done, n_bytes, at))
        self.n_bytes = max(self.n_bytes, at + n_bytes)
        return n_bytes

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


class Buffer:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        #: of copies from it
        self.events: list[CopyEvent] = []

    def wait(self) -> None:
        """Until nobody reads it."""
        while self.events:
            self.events.pop().synchronize()

    def view(self, n_bytes: int) -> memoryview:
        return memoryview(ffi.buffer(ffi.cast("char *", self.memory.data_ptr()), n_bytes))

    def crc32(self, begin: int, n_bytes: int) -> int:
        at = ffi.cast("char *", self.memory.data_ptr() + begin)
        return int(lib.base_crc32(0, at, n_bytes))


class Incoming:
    """What is wanted of a file on devices. `n_bytes`: at most so much of it is."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._buffers: list[Buffer] = []
        self._wanted: list[Wanted] = []

    def takes(self, device: torch.device) -> bool:
        """Whether this is a device that is copied to from pinned memory."""
        if device not in self._streams:
            try:
                stream = self._streams[device] = open_stream(device)
                if not self._buffers:
                    self._buffers = [*map(Buffer, buffers_of(stream, self._n_bytes))]
            except RuntimeError:
                self._streams[device] = None
        return self._streams[device] is not None

    def add(self, wanted: Wanted) -> None:
        """Its device is one of those that are taken."""
        self._wanted.append(wanted)

    def wanted(self) -> list[Wanted]:
        """What has been added, in that order."""
        return list(self._wanted)

    def pieces(self) -> list[Piece]:
        """To exchange what is wanted with other ranks; none if their devices have no way."""
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
        exchange: Callable[[], None] | None = None,
    ) -> None:
        """Brings all of it. read(offset, into) reads bytes of the file, and verifies them.

        `exchange` brings it in the place of that, in pieces().
        """
        wanted, self._wanted = self._wanted, []
        if not wanted or not self._buffers:
            return  # or all of it is empty
        for device in {one.into.device for one in wanted}:
            stream = self._streams[device]
            assert stream is not None
            # What the memory was used for before may not have been done yet.
            stream.wait_for_caller()
        try:
            if exchange is not None:
                exchange()
            else:
                self._bring(wanted, read)
            for buffer in self._buffers:
                buffer.wait()
        finally:
            # Whatever has failed: from here on nobody writes to what is its owner's.
            self._abandon()

    def _bring(self, wanted: list[Wanted], read: Callable[[int, memoryview], object]) -> None:
        crcs: dict[int, int] = {}
        buffers = itertools.cycle(self._buffers)
        for stretch in stretches(wanted, self._buffers[0].memory.numel()):
            buffer = next(buffers)
            buffer.wait()
            read(stretch.begin, buffer.view(stretch.n_bytes))
            for part in stretch.unverified():
                verify(part, buffer.crc32(part.at, part.n_bytes), crcs)
            self._copy(stretch, buffer)

    def _copy(self, stretch: Stretch, buffer: Buffer) -> None:
        used: dict[torch.device, CopyStream] = {}
        try:
            for wanted, begin, n_bytes, at in stretch.parts:
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
                # The device has failed; what it said first is being raised.
                buffer.events.clear()


def verify(part: Part, crc32: int, crcs: dict[int, int]) -> None:
    """Adds the checksum of a part to those of the parts before it, and compares the last."""
    wanted = part.wanted
    key = id(wanted)
    crcs[key] = int(lib.base_crc32_combine(crcs.get(key, 0), crc32, part.n_bytes))
    if part.is_last and crcs[key] != wanted.crc32 and wanted.damaged is not None:
        raise wanted.damaged()
