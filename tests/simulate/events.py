# SPDX-License-Identifier: Apache-2.0
"""Run events in order of time, and model a crowd of writers that share a storage."""

import heapq
import math
from collections.abc import Callable
from itertools import count


class Crowd:
    """Concurrent writers with equal speed, which depends on their number."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.now = 0.0
        self.weight = 0
        self._rate_of = rate
        self._passed = 0.0  # bytes that a writer would have written that was always there
        self._ends: list[tuple[float, int, object]] = []
        self._numbers = count()
        self._gone: set[int] = set()

    def _rate(self) -> float:
        return self._rate_of(self.weight) if self.weight else 0.0

    def advance(self, at: float) -> None:
        self._passed += self._rate() * (at - self.now)
        self.now = at

    def enter(self, writer: object, needs: float, weight: int) -> None:
        heapq.heappush(self._ends, (self._passed + needs, next(self._numbers), writer))
        self.weight += weight

    def leave(self, writer: object, weight: int) -> None:
        self._gone.add(id(writer))
        self.weight -= weight

    def next_end(self) -> tuple[float, object]:
        """Return the end of the next writer and the writer, or infinity and None."""
        while self._ends and id(self._ends[0][2]) in self._gone:
            self._gone.remove(id(heapq.heappop(self._ends)[2]))
        if not self._ends:
            return math.inf, None
        at, _, writer = self._ends[0]
        return self.now + max(at - self._passed, 0.0) / self._rate(), writer


class Events:
    """A clock and its events. `rate` returns the speed of each writer of the crowd."""

    def __init__(self, rate: Callable[[int], float] = lambda _writers: 1.0) -> None:
        self.now = 0.0
        self.crowd = Crowd(rate)
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def at(self, time: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._waiting, (time, next(self._numbers), action))

    def run(self, until: float) -> None:
        while True:
            end, writer = self.crowd.next_end()
            time = self._waiting[0][0] if self._waiting else math.inf
            if min(time, end) > until or (writer is None and not self._waiting):
                break
            self.passes(min(time, end))
            if time <= end:
                heapq.heappop(self._waiting)[2]()
            else:
                self.written(writer)
            self.happened()
        if math.isfinite(until):
            self.passes(until)

    @property
    def is_over(self) -> bool:
        return not self._waiting and self.crowd.next_end()[1] is None

    def passes(self, at: float) -> None:
        """Advance the clock."""
        self.now = at
        self.crowd.advance(at)

    def written(self, writer: object) -> None:
        """Handle a writer of the crowd that is done. The override must make it leave the crowd."""
        raise NotImplementedError

    def happened(self) -> None:
        """Do what follows each event."""
