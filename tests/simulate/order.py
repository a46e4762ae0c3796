# SPDX-License-Identifier: Apache-2.0
"""Which save gets the next free slot.

One rule for all orders: flows get slots by start-time fair queueing, in proportion to their shares
(docs/slots.md); within a flow the save with the least rank is next. With one flow for all, the rank
alone decides. Three of them are orders of slots.lua.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .workload import NODE_MTBF_S, Job


@dataclass
class Save:
    """One checkpoint of a job: a request of each node."""

    job: Job
    asked_s: float
    #: since when work would be lost
    since_s: float
    background: bool
    waiting: int = 0  # nodes that have no slot yet
    writing: int = 0
    first_s: float = math.inf  # when the first one got its slot
    cancelled: bool = False


class Queue(Protocol):
    """What the cluster asks: who waits, and who is next."""

    def push(self, save: Save) -> None: ...
    def pop(self, free: int) -> tuple[Save, int] | None:
        """So many of its nodes get a slot, of as many as are free."""

    def cancel(self, save: Save) -> None:
        """Its waiting nodes are gone."""

    def done(self, save: Save, nodes: int) -> None:
        """So many of its nodes gave their slots back."""

    def advance(self, at_s: float) -> None:
        """It is now later."""


@dataclass(frozen=True)
class Order:
    """A rule."""

    name: str
    flow: Callable[[Job], int]
    share: Callable[[Job], float]
    rank: Callable[[Save], float]


def interval_class(job: Job) -> int:
    """Set-10: the order of magnitude of the time between two of its saves."""
    return round(math.log10(job.interval_s))


#: a save that costs twice as much for each byte goes before those that came so much earlier; what
#: it usually costs; and by how much it is earlier or later at most (libioshape/slots/order.c)
DOUBLE_S = 60.0
USUAL_COST = 3e-11
MOST_ADVANCE_S = 300.0
RANKS_PER_NODE = 8


def advance_s(save: Save) -> float:
    """How much earlier a save counts for what its waiting costs: a time, so that whoever comes much
    later comes after."""
    # A failure loses what all nodes did since the last save; or all of them stand still.
    at_risk = save.job.nodes * (save.asked_s - save.since_s) / NODE_MTBF_S
    cost = (at_risk + (not save.background)) * RANKS_PER_NODE / save.job.node_bytes
    advance = DOUBLE_S * math.log2(max(cost / USUAL_COST, 1e-30))
    return max(min(advance, MOST_ADVANCE_S), -MOST_ADVANCE_S)


def waste_rank(save: Save) -> float:
    return save.asked_s - advance_s(save)


ORDERS = {
    "fcfs": Order("first come, first served", lambda _: 0, lambda _: 1.0, lambda one: one.asked_s),
    "fair": Order("fair shares", lambda job: job.number, lambda _: 1.0, lambda one: one.asked_s),
    "set10": Order(
        "Set-10", interval_class, lambda job: 10.0 ** -interval_class(job), lambda one: one.asked_s
    ),
    "waste": Order("by waste", lambda _: 0, lambda _: 1.0, waste_rank),
}


@dataclass
class Flow:
    """Saves that share a share."""

    share: float
    finish: float = 0.0
    tag: float = 0.0  # start of its next request
    queued: bool = False
    saves: list[tuple[float, int, Save]] = field(default_factory=list)


class Fair:
    """Start-time fair queueing over flows."""

    def __init__(self, order: Order, quantum: int = 1) -> None:
        self.order, self.quantum = order, quantum
        self._flows: dict[int, Flow] = {}
        self._heap: list[tuple[float, int]] = []
        self._served = 0.0  # virtual time: the highest tag that was served
        self._pushed = 0

    def push(self, save: Save) -> None:
        number = self.order.flow(save.job)
        flow = self._flows.setdefault(number, Flow(self.order.share(save.job)))
        self._pushed += 1
        heapq.heappush(flow.saves, (self.order.rank(save), self._pushed, save))
        self._queue(number, flow)

    def pop(self, free: int) -> tuple[Save, int] | None:
        while self._heap:
            _, number = heapq.heappop(self._heap)
            flow = self._flows[number]
            flow.queued = False
            while flow.saves and not flow.saves[0][2].waiting:
                heapq.heappop(flow.saves)
            if flow.saves:
                return self._serve(number, flow, free)
        return None

    def cancel(self, save: Save) -> None:
        save.waiting = 0

    def done(self, save: Save, nodes: int) -> None:
        pass

    def advance(self, at_s: float) -> None:
        pass

    def _queue(self, number: int, flow: Flow) -> None:
        if not flow.queued:
            flow.queued, flow.tag = True, max(self._served, flow.finish)
            heapq.heappush(self._heap, (flow.tag, number))

    def _serve(self, number: int, flow: Flow, free: int) -> tuple[Save, int]:
        save = flow.saves[0][2]
        # Who has no rival needs no turns.
        nodes = min(free, save.waiting, self.quantum if self._heap else free)
        self._served = max(self._served, flow.tag)
        flow.finish = flow.tag + nodes * save.job.node_bytes / flow.share
        save.waiting -= nodes
        if save.waiting == 0:
            heapq.heappop(flow.saves)
        if flow.saves:
            self._queue(number, flow)
        return save, nodes
