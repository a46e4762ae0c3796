# SPDX-License-Identifier: Apache-2.0
"""From devices to a save.

The library asks for the bytes of storages in the order of the file, piece by piece. While it
copies, checksums and writes one piece, the next are on their way through pinned buffers, also those
of the next storages.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ioshape._core.structs import called_from_c, keep_failure
from ioshape._device.sample import Sample
from ioshape._device.stream import Blocking, buffers_of, bytes_of, open_stream
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from ioshape._device.stream import CopyEvent, CopyStream


class Fetched(NamedTuple):
    """A record that is fetched from a device."""

    name: str
    storage: torch.UntypedStorage
    #: after the call, when its owner says that it must be copied now
    later: bool


class _Sent(NamedTuple):
    """A buffer that is being filled, or has been."""

    memory: torch.Tensor
    #: of all storages' bytes, one behind the other
    begin: int
    end: int
    event: CopyEvent


class Outgoing:
    """Storages of one device. Make it where they are valid: on the caller's stream."""

    def __init__(
        self,
        storages: list[torch.UntypedStorage],
        stream: CopyStream,
        buffers: list[torch.Tensor],
        sample: Sample | None = None,
    ) -> None:
        #: None: all of it was taken, and the storage is its owner's alone again
        self._sources: list[torch.Tensor | None] = [bytes_of(storage) for storage in storages]
        #: where each begins, one behind the other, and where the last ends
        self._begins = list(itertools.accumulate((one.nbytes() for one in storages), initial=0))
        self._left = len(storages)
        self._stream: CopyStream | None = stream
        self._free = buffers
        self._copier = ffi.gc(lib.base_copier_open(), lib.base_copier_free)
        self._sent: deque[_Sent] = deque()
        self._next = 0  # the storage that is sent next, from `_send_from` on
        self._send_from = 0
        self._taken = 0
        #: of what must not change before all of it is taken
        self._sample = sample
        stream.wait_for_caller()

    def _send(self) -> None:
        """Sends for the next pieces as long as there is a buffer."""
        while self._free:
            while self._next < len(self._sources) and self._sources[self._next] is None:
                self._next += 1
                self._send_from = self._begins[self._next]
            if self._next == len(self._sources):
                break
            self._fill(self._free.pop())

    def _fill(self, memory: torch.Tensor) -> None:
        assert self._stream is not None
        begin = self._send_from
        end = begin + memory.numel()
        while self._next < len(self._sources) and self._send_from < end:
            source, first = self._sources[self._next], self._begins[self._next]
            if source is None:
                break
            until = min(end, self._begins[self._next + 1])
            part = memory[self._send_from - begin : until - begin]
            self._stream.copy(part, source[self._send_from - first : until - first])
            self._send_from = until
            if until == self._begins[self._next + 1]:
                self._next += 1
        self._sent.append(_Sent(memory, begin, self._send_from, self._stream.record()))

    def _go_to(self, number: int, at: int) -> None:
        """What is asked for does not follow: some storages are copied in the call, some later."""
        while self._sent and not self._sent[0].begin <= at < self._sent[0].end:
            # What is copied to it next comes after what is on its way.
            self._free.append(self._sent.popleft().memory)
        if not self._sent:
            self._next, self._send_from = number, at
        self._taken = at

    def fetch(self, number: int, offset: int, into: Any, n_bytes: int) -> None:
        """Brings bytes [offset, offset + n_bytes) of a storage; each once, and in order."""
        at = self._begins[number] + offset
        if self._sources[number] is None:
            raise RuntimeError(f"bytes {offset} of storage {number} are asked for twice")
        if at != self._taken or not self._sent:
            self._go_to(number, at)
        to = ffi.cast("char *", into)
        done = 0
        while done < n_bytes:
            self._send()
            sent = self._sent[0]
            sent.event.synchronize()
            first = self._taken - sent.begin
            count = min(n_bytes - done, sent.end - self._taken)
            # Without the GIL, and not by torch: its threads spin until the next copy.
            source = ffi.cast("char *", sent.memory.data_ptr() + first)
            lib.base_copier_copy(self._copier, to + done, source, count)
            done += count
            self._taken += count
            if self._taken == sent.end:
                self._free.append(self._sent.popleft().memory)
        if self._taken == self._begins[number + 1]:
            self._sources[number] = None
            self._left -= 1
            if not self._left:
                self._end()

    def _end(self) -> None:
        assert self._stream is not None
        if self._sample is not None:
            self._sample.compare(self._stream)
        self._free.clear()
        self._copier = self._sample = self._stream = None


class Courier:
    """Fetches one storage for C."""

    def __init__(self, outgoing: Outgoing, number: int) -> None:
        self._outgoing = outgoing
        self._number = number
        self.failure: BaseException | None = None

    def fetch(self, offset: int, into: Any, n_bytes: int) -> None:
        """What the library calls."""
        self._outgoing.fetch(self._number, offset, into, n_bytes)


def _outgoing(device: torch.device, all_fetched: list[Fetched], path: str) -> tuple[Outgoing, str]:
    """And why it has no pinned memory; "" if it has."""
    storages = [one.storage for one in all_fetched]
    n_bytes = sum(storage.nbytes() for storage in storages)
    why = ""
    try:
        stream: CopyStream = open_stream(device)
        buffers = buffers_of(stream, n_bytes)
    except RuntimeError as error:
        why = f"tensors on {device} were copied without pinned memory: {error}"
        stream = Blocking(device)
        buffers = buffers_of(stream, n_bytes)
    sample = None
    if all_fetched[0].later:
        sample = Sample([*map(bytes_of, storages)], [one.name for one in all_fetched], path)
    return Outgoing(storages, stream, buffers, sample), why


def couriers_for(
    all_fetched: list[Fetched], path: str = ""
) -> tuple[list[Courier], tuple[str, ...]]:
    """One for each that has bytes, and what was not as preferred.

    Of one device, the library asks for those that are not copied later, in their order, and then
    for those that are.
    """
    groups: dict[tuple[torch.device, bool], list[int]] = {}
    for place, one in enumerate(all_fetched):
        groups.setdefault((one.storage.device, one.later), []).append(place)
    found: dict[int, Courier] = {}
    notes: dict[str, None] = {}
    for (device, _later), places in groups.items():
        outgoing, why = _outgoing(device, [all_fetched[place] for place in places], path)
        if why:
            notes[why] = None
        found |= {place: Courier(outgoing, number) for number, place in enumerate(places)}
    return [found[place] for place in range(len(all_fetched))], tuple(notes)


@called_from_c(error=-5, onerror=keep_failure)
def ioshape_py_fetch(courier: Courier, offset: int, into: Any, n_bytes: int) -> int:
    courier.fetch(offset, into, n_bytes)
    return 0


FETCH = lib.ioshape_py_fetch
