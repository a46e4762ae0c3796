# SPDX-License-Identifier: Apache-2.0
"""Copies from devices to a save.

The library asks for the bytes of storages in the order of the file, piece by piece. While it
copies, checksums and writes one piece, the next pieces are being copied into pinned buffers. These
may belong to the next storages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ioshape._core.errors import failure
from ioshape._core.structs import called_from_c, keep_failure
from ioshape._device.stream import Blocking, buffers_of, bytes_of, open_stream
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from ioshape._core.errors import StorageError
    from ioshape._device.stream import CopyEvent, CopyStream


class Fetched(NamedTuple):
    """A record whose bytes are fetched from a device."""

    name: str
    storage: torch.UntypedStorage
    #: whether it is fetched after the save call has returned, when a step asks for the copy
    later: bool


class _Sent(NamedTuple):
    """A buffer to which a copy was queued."""

    memory: torch.Tensor
    #: range of its bytes, counted over all storages one after the other
    begin: int
    end: int
    event: CopyEvent


class Outgoing:
    """Storages of one device. Create it while they are valid on the caller's stream."""

    def __init__(
        self,
        storages: list[torch.UntypedStorage],
        stream: CopyStream,
        buffers: list[torch.Tensor],
        sample: Sample | None = None,
    ) -> None:
        #: the storages as bytes; None once all of a storage was fetched, so that its owner may free
        #: it
        self._sources: list[torch.Tensor | None] = [bytes_of(storage) for storage in storages]
        #: offset of each storage, counted over all one after the other, and the end of the last
        self._begins = list(itertools.accumulate((one.nbytes() for one in storages), initial=0))
        self._left = len(storages)
        self._stream: CopyStream | None = stream
        self._free = buffers
        self._copier = ffi.gc(lib.base_copier_open(), lib.base_copier_free)
        self._sent: deque[_Sent] = deque()
        self._next = 0  # index of the storage to copy next, from the offset _send_from on
        self._send_from = 0
        self._taken = 0
        #: sample of storages that must not change until all bytes were fetched; None without any
        self._sample = sample
        stream.wait_for_caller()

    def _send(self) -> None:
        """Queue copies of the next pieces as long as a buffer is free."""
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
        """Continue at another offset.

        This happens because the library fetches some storages during the call and some later.
        """
        while self._sent and not self._sent[0].begin <= at < self._sent[0].end:
            # The stream runs copies in order, so the buffer may be reused though its copy is in
            # flight.
            self._free.append(self._sent.popleft().memory)
        if not self._sent:
            self._next, self._send_from = number, at
        self._taken = at

    def fetch(self, number: int, offset: int, into: Any, n_bytes: int) -> None:
        """Copy bytes [offset, offset + n_bytes) of a storage. Copy each byte once, in order."""
        at = self._begins[number] + offset
        if self._sources[number] is None:
            raise RuntimeError(f"bytes {offset} of storage {number} are requested twice")
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
            # This copies without the GIL. torch would copy with threads that spin until the next
            # copy.
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
    """An object that fetches one storage for C."""

    def __init__(self, outgoing: Outgoing, number: int) -> None:
        self._outgoing = outgoing
        self._number = number
        self.failure: BaseException | None = None

    def fetch(self, offset: int, into: Any, n_bytes: int) -> None:
        """Fetch bytes. C calls this through ioshape_py_fetch()."""
        self._outgoing.fetch(self._number, offset, into, n_bytes)


def _outgoing(device: torch.device, all_fetched: list[Fetched], path: str) -> tuple[Outgoing, str]:
    """Return the storages as an Outgoing, and why it has no pinned memory; "" if it has."""
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
    """Return a courier for each record, in order, and the downgrades.

    For each device, the library first fetches the records that are not copied later, and then the
    others, each in order.
    """
    groups: dict[tuple[torch.device, bool], list[int]] = {}
    for number, one in enumerate(all_fetched):
        groups.setdefault((one.storage.device, one.later), []).append(number)
    found: dict[int, Courier] = {}
    downgrades: dict[str, None] = {}
    for (device, _later), numbers in groups.items():
        outgoing, why = _outgoing(device, [all_fetched[number] for number in numbers], path)
        if why:
            downgrades[why] = None
        found |= {index: Courier(outgoing, number) for number, index in enumerate(numbers)}
    return [found[number] for number in range(len(all_fetched))], tuple(downgrades)


@called_from_c(error=-5, onerror=keep_failure)
def ioshape_py_fetch(courier: Courier, offset: int, into: Any, n_bytes: int) -> int:
    courier.fetch(offset, into, n_bytes)
    return 0


FETCH = lib.ioshape_py_fetch


# ---- Changes while a copy waits ------------------------------------------------------------------
#
# Detection of changes to storages of a device while they wait to be copied, by samples.

# The C library uses these numbers for host memory (libioshape/save/staging.c).
_SAMPLES = 16
_SAMPLE_BYTES = 64


def _some_of(memory: torch.Tensor) -> torch.Tensor:
    step = (memory.numel() - _SAMPLE_BYTES) // (_SAMPLES - 1)
    return memory.as_strided((_SAMPLES, _SAMPLE_BYTES), (step, 1))


class Sample:
    """Sampled bytes of storages of one device. Create it on the caller's stream."""

    def __init__(self, storages: list[torch.Tensor], names: list[str], path: str) -> None:
        self._path = path
        # Smaller storages are skipped: a step that changes them changes large ones as well.
        looked_at = [
            (name, _some_of(memory))
            for name, memory in zip(names, storages, strict=True)
            if memory.numel() >= _SAMPLES * _SAMPLE_BYTES
        ]
        self._names = [name for name, _ in looked_at]
        self._rows = [rows for _, rows in looked_at]
        self._first: torch.Tensor | None = None
        # Without free memory on the device there is no sample. A save must not fail because of
        # that.
        with contextlib.suppress(RuntimeError):
            self._first = torch.cat(self._rows) if self._rows else None

    def compare(self, stream: CopyStream) -> None:
        """Compare the storages with the sample, after all copies that were queued so far.

        Raises:
            StorageError: A storage has changed.
        """
        first = self._first
        if first is None:
            return
        differ = torch.zeros(len(self._rows), dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            there = stream.pinned(len(self._rows))
            stream.compute(
                lambda: (torch.cat(self._rows) != first).view(len(self._rows), -1).any(1), there
            )
            stream.record().synchronize()
            differ = there
        for name, has_changed in zip(self._names, differ.tolist(), strict=True):
            if has_changed:
                raise self._changed(name)

    def _changed(self, name: str) -> StorageError:
        return failure(
            lib.IOSHAPE_E_CHANGED,
            f"cannot save \"{self._path}\": record '{name}' changed before ioshape had copied it",
            self._path,
            "save",
            remedy="change it only after the save has copied it",
            record=name,
        )
