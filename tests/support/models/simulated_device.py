# SPDX-License-Identifier: Apache-2.0
"""A simulated device with its own memory, whose copies run as late as they may.

Its memory is the CPU's. A copy is queued when it is requested. It is done when the program waits
for it or for a later copy of its stream. Until then its destination holds POISON, unless an earlier
copy still has to read that memory. So a program that reads before it has waited, or that changes
the source of a pending copy, gets wrong bytes. The order between streams comes from a seed.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

POISON = 0xA5


class Event:
    def __init__(self, stream: Stream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.device.run_some_of_others(self._stream)
        self._stream.run(self._number)


class Stream:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()
        self.begun = 0  # number of operations taken from the queue so far
        self.waited_for_caller = False
        #: addresses of the memory that queued copies will read
        self.to_be_read: Counter[int] = Counter()

    def pinned(self, n_bytes: int) -> torch.Tensor:
        return self.device.pinned(n_bytes)

    def wait_for_caller(self) -> None:
        self.waited_for_caller = True
        self.queue.append(self.device.run_caller)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        assert self.waited_for_caller, "a copy might come before what the caller has asked for"
        assert into.dtype == source.dtype == torch.uint8
        assert into.numel() == source.numel()
        self.device.asks(into.numel())
        self._poison(into)
        read = _place(source)
        self.to_be_read[read] += 1

        def copy() -> None:
            self.to_be_read[read] -= 1
            self.device.copy(into, source)

        self.queue.append(copy)

    def compute(self, result: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
        assert self.waited_for_caller, "it might come before what the caller has asked for"
        self._poison(into)

        def take() -> None:
            into.copy_(result())

        self.queue.append(take)

    def broadcast(self, memory: torch.Tensor, root: int) -> None:
        assert self.waited_for_caller, "it might come before what the caller has asked for"
        if self.device.rank != root:
            self._poison(memory)
        self.queue.append(lambda: self.device.group.broadcast(memory, root).wait())

    def _poison(self, memory: torch.Tensor) -> None:
        if not self.to_be_read[_place(memory)]:
            memory.fill_(POISON)

    def record(self) -> Event:
        return Event(self, self.begun + len(self.queue))

    def run(self, until: int) -> None:
        """Run all operations with a number below `until`."""
        while self.queue and self.begun < until:
            self.begun += 1
            self.queue.popleft()()


def _place(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


class SimulatedDevice:
    """A simulated device. Its `open` replaces ioshape's open_stream()."""

    def __init__(self, seed: int = 0) -> None:
        self.streams: list[Stream] = []
        #: operations on the caller's own stream that are not done yet
        self.asked: list[Callable[[], object]] = []
        self.can_pin = True
        #: torch process group of the ranks whose devices are connected
        self.group: Any = None
        self.rank = 0
        self.pinned_bytes = self.most_pinned_bytes = 0
        self.copied: list[int] = []  # length of each copy
        #: number of bytes from which copies fail, either at the request or when they are done
        self.fails_at: int | None = None
        self.fails_late = False
        self._asked_bytes = self._done_bytes = 0
        self._random = random.Random(seed)

    def open(self, _device: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @property
    def is_idle(self) -> bool:
        """True if all operations are done."""
        return not any(stream.queue for stream in self.streams)

    def run_caller(self) -> None:
        while self.asked:
            self.asked.pop(0)()

    def run_some_of_others(self, stream: Stream) -> None:
        for other in self.streams:
            if other is not stream:
                other.run(other.begun + self._random.randint(0, len(other.queue)))

    def pinned(self, n_bytes: int) -> torch.Tensor:
        if not self.can_pin:
            raise RuntimeError("no more memory can be pinned")
        memory = torch.full((n_bytes,), POISON, dtype=torch.uint8, device="cpu")
        self.pinned_bytes += n_bytes
        self.most_pinned_bytes = max(self.most_pinned_bytes, self.pinned_bytes)
        weakref.finalize(memory, self._unpin, n_bytes)
        return memory

    def _unpin(self, n_bytes: int) -> None:
        self.pinned_bytes -= n_bytes

    def _fail(self, n_bytes: int) -> None:
        if self.fails_at is not None and n_bytes > self.fails_at:
            raise torch.AcceleratorError("the device is gone", 1)

    def asks(self, n_bytes: int) -> None:
        self._asked_bytes += n_bytes
        if not self.fails_late:
            self._fail(self._asked_bytes)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self._done_bytes += into.numel()
        self._fail(self._done_bytes)
        self.copied.append(into.numel())
        into.copy_(source)
