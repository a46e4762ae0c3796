# SPDX-License-Identifier: Apache-2.0
"""Decide which save gets the next free slot.

All orders use one rule (docs/slots.md). Start-time fair queueing gives slots to flows in proportion
to their shares, in turns. A boost moves a save ahead of its flow's share, or behind. Within a flow
the first request is served first. With a single flow, only that counts. The order "ours" is that of
slots.lua.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .workload import NODE_MTBF_S, Job


@dataclass
class Save:
    """One checkpoint of a job: one request from each node."""

    job: Job
    asked_s: float
    #: Time since when work is not saved yet.
    since_s: float
    background: bool
    waiting: int = 0  # number of nodes without a slot
    writing: int = 0
    first_s: float = math.inf  # time of the first granted slot
    cancelled: bool = False


class Queue(Protocol):
    """The interface of a queue of saves to the cluster."""

    def push(self, save: Save) -> None: ...
    def pop(self, free: int) -> tuple[Save, int] | None:
        """Grant slots to nodes of one save; return it and their number, `free` at most."""

    def cancel(self, save: Save) -> None:
        """Remove the waiting nodes of a save."""

    def done(self, save: Save, nodes: int) -> None:
        """Take back the slots of some nodes."""

    def advance(self, at_s: float) -> None:
        """Advance the clock."""


@dataclass(frozen=True)
class Order:
    """A rule that orders saves."""

    name: str
    flow: Callable[[Job], int]
    share: Callable[[Job], float] = lambda _: 1.0
    #: Boost in seconds of the whole pool.
    boost_s: Callable[[Save], float] = lambda _: 0.0
    turn_s: float = 0.0


def interval_class(job: Job) -> int:
    """Return Set-10's class of a job: the order of magnitude of the time between two saves."""
    return round(math.log10(job.interval_s))


#: Turn of a job in seconds of the whole pool, from libioshape/slots/slots.lua.
TURN_S = 20.0
#: Boost for each doubling of the cost per byte, the usual cost per byte, and the largest boost in
#: either direction. The values are from libioshape/slots/identity.c.
DOUBLE_S = 60.0
USUAL_COST = 3e-11
MOST_BOOST_S = 300.0
RANKS_PER_NODE = 8


def boost_s(save: Save) -> float:
    """Return the boost of a save for what its waiting costs."""
    # A failure loses the work of all nodes since the last save. In a blocking save all nodes stand
    # still.
    at_risk = save.job.nodes * (save.asked_s - save.since_s) / NODE_MTBF_S
    cost = (at_risk + (not save.background)) * RANKS_PER_NODE / save.job.node_bytes
    boost = DOUBLE_S * math.log2(max(cost / USUAL_COST, 1e-30))
    return max(min(boost, MOST_BOOST_S), -MOST_BOOST_S)


ORDERS = {
    "fcfs": Order("first come, first served", lambda _: 0),
    "fair": Order("fair shares", lambda job: job.number),
    "set10": Order("Set-10", interval_class, lambda job: 10.0 ** -interval_class(job)),
    "ours": Order("turns and boosts", lambda job: job.number, boost_s=boost_s, turn_s=TURN_S),
}


@dataclass
class Flow:
    """Saves that have one share together."""

    share: float
    finish: float = 0.0
    tag: float = 0.0  # start tag of its next request
    turn: float = 0.0  # start tag of its turn
    turn_of: Save | None = None
    queued: bool = False
    writing: int = 0
    has_been: bool = False  # was present when its latest request began
    saves: deque[Save] = field(default_factory=deque)

    @property
    def is_present(self) -> bool:
        return bool(self.saves or self.writing)


class Fair:
    """Start-time fair queueing over flows. Tags are in bytes; `bandwidth` is that of the pool."""

    def __init__(self, order: Order, quantum: int = 1, bandwidth: float = 0.0) -> None:
        self.order, self.quantum, self.bandwidth = order, quantum, bandwidth
        self._flows: dict[int, Flow] = {}
        self._heap: list[tuple[float, int]] = []
        self._virtual = 0.0
        self._shares = 0.0  # sum over the flows that are present

    def push(self, save: Save) -> None:
        number = self.order.flow(save.job)
        flow = self._flows.setdefault(number, Flow(self.order.share(save.job)))
        if not flow.is_present:
            self._shares += flow.share
            flow.has_been = False
        flow.saves.append(save)
        self._queue(number, flow)

    def pop(self, free: int) -> tuple[Save, int] | None:
        while self._heap:
            score, number = heapq.heappop(self._heap)
            flow = self._flows[number]
            flow.queued = False
            if self._drop_done(flow):
                self._queue(number, flow)
            elif flow.saves:
                return self._serve(number, flow, score, free)
        return None

    def cancel(self, save: Save) -> None:
        save.waiting = 0

    def done(self, save: Save, nodes: int) -> None:
        flow = self._flows[self.order.flow(save.job)]
        flow.writing -= nodes
        if not flow.is_present:
            self._shares -= flow.share

    def advance(self, at_s: float) -> None:
        pass

    def _drop_done(self, flow: Flow) -> bool:
        """Drop saves without waiting nodes, and return whether there were any."""
        before = len(flow.saves)
        while flow.saves and not flow.saves[0].waiting:
            flow.saves.popleft()
        if not flow.is_present:
            self._shares -= flow.share
        return len(flow.saves) < before

    def _queue(self, number: int, flow: Flow) -> None:
        if flow.saves and not flow.queued:
            whole, boost = self.bandwidth / flow.share, self.order.boost_s(flow.saves[0])
            credit = self.order.turn_s - min(boost, 0) if flow.has_been else 0
            present = self._virtual - credit * whole
            flow.queued, flow.tag, flow.has_been = True, max(present, flow.finish), True
            is_other = flow.turn_of is not flow.saves[0]
            is_over = flow.tag - flow.turn > self.order.turn_s * whole
            if flow.tag <= self._virtual or is_other or is_over:
                flow.turn, flow.turn_of = flow.tag, flow.saves[0]
            heapq.heappush(self._heap, (flow.turn - boost * whole, number))

    def _serve(self, number: int, flow: Flow, score: float, free: int) -> tuple[Save, int]:
        save = flow.saves[0]
        # A flow without rivals needs no turns.
        nodes = min(free, save.waiting, self.quantum if self._heap else free)
        cost = nodes * save.job.node_bytes
        self._virtual = max(self._virtual + cost / self._shares, min(flow.turn, score))
        flow.finish = flow.tag + cost / flow.share
        flow.writing += nodes
        save.waiting -= nodes
        if save.waiting == 0:
            flow.saves.popleft()
        self._queue(number, flow)
        return save, nodes
