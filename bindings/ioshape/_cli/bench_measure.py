# SPDX-License-Identifier: Apache-2.0
"""Measurements of "ioshape bench": ranks save together in several ways, beside neighbours.

The ways alternate, so that a temporarily slow disk slows all of them alike.
"""

from __future__ import annotations

import shutil
import time
import uuid
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from ioshape._cli import bench_members as members
from ioshape._cli.bench_members import (
    READ,
    WRITE,
    Crowd,
    Member,
    Operation,
    Order,
    RankSetup,
    Saved,
)
from ioshape._cli.trace import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

#: delay of a round's begin, so that all ranks have received the order by then
_AHEAD_NS = 60_000_000
#: pause in which a disk completes its work for removed files
_QUIET_S = 0.3
#: how long neighbours run before the first save
ALONE_S = 2.0
_READY_TIMEOUT_S = 300.0
_SAVE_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Plan:
    """The parameters of a measurement."""

    #: ranks that save together
    ranks: int
    #: bytes that each rank saves
    n_bytes: int
    #: ways to save; the others are compared with the first
    ways: tuple[str, ...]
    rounds: int = 3


# ---- Figures ------------------------------------------------------------------------------------


@dataclass
class Round:
    """One save by all ranks, in one way."""

    way: str
    #: when all ranks were to begin, by time.monotonic_ns()
    at_ns: int
    ranks: list[Saved]
    #: neighbours' operations that began while ranks were saving
    operations: list[Operation] = field(default_factory=list)

    @property
    def completions_s(self) -> list[float]:
        """Seconds until each rank's file was durable."""
        return [(rank.end_ns - self.at_ns) / 1e9 for rank in self.ranks]

    @property
    def stalls_s(self) -> list[float]:
        """Seconds for which each rank's training waited."""
        return [(rank.returned_ns - rank.begin_ns) / 1e9 for rank in self.ranks]

    @property
    def makespan_s(self) -> float:
        return max(self.completions_s)


@dataclass
class Latency:
    """The latency of neighbours' operations."""

    #: number of operations
    count: int
    p50_ms: float
    p99_ms: float
    most_ms: float

    @classmethod
    def of(cls, operations: Sequence[Operation], kind: str) -> Latency | None:
        """Return the latency of all operations of a kind; None if there were none."""
        took = [one.took_ns / 1e6 for one in operations if one.kind == kind]
        if not took:
            return None
        return cls(len(took), percentile(took, 50), percentile(took, 99), max(took))


@dataclass
class Neighbours:
    """The latency of neighbours' reads and writes; None if there were none."""

    reads: Latency | None
    writes: Latency | None

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> Neighbours:
        return cls(Latency.of(operations, READ), Latency.of(operations, WRITE))


@dataclass
class Summary:
    """All rounds of one way. Seconds are medians of the rounds."""

    rounds: list[Round] = field(default_factory=list)

    @property
    def makespan_s(self) -> float:
        return median(one.makespan_s for one in self.rounds)

    @property
    def mean_completion_s(self) -> float:
        return median(fmean(one.completions_s) for one in self.rounds)

    @property
    def stall_s(self) -> float:
        """The stall of training, mean over the ranks."""
        return median(fmean(one.stalls_s) for one in self.rounds)

    @property
    def most_stall_s(self) -> float:
        """The stall of the rank that waited longest."""
        return median(max(one.stalls_s) for one in self.rounds)

    @property
    def cpu_s(self) -> float:
        """The CPU seconds of all ranks together."""
        return median(sum(rank.cpu_s for rank in one.ranks) for one in self.rounds)

    @property
    def neighbours(self) -> Neighbours:
        """The latency of the neighbours' operations in all rounds."""
        return Neighbours.of([one for turn in self.rounds for one in turn.operations])

    @property
    def typical(self) -> Round:
        """The round whose makespan is the median, or the next above it."""
        return sorted(self.rounds, key=lambda one: one.makespan_s)[len(self.rounds) // 2]


@dataclass
class Ratios:
    """Ratios that compare one way with another. Above 1, the first way is better."""

    makespan: float
    mean_completion: float
    reads_p99: float | None

    @classmethod
    def of(cls, ours: Summary, theirs: Summary) -> Ratios:
        mine, other = ours.neighbours.reads, theirs.neighbours.reads
        return cls(
            theirs.makespan_s / ours.makespan_s,
            theirs.mean_completion_s / ours.mean_completion_s,
            other.p99_ms / mine.p99_ms if mine and other else None,
        )


# ---- Measuring ----------------------------------------------------------------------------------


class Storm(Crowd):
    """The worker processes of a bench, the rounds that they run, and the results.

    Args:
        plan: What to measure.
        folder: Scratch folder, which the caller removes.

    The caller must not have started a thread before it enters the with block, because that forks.

    Raises:
        MemberError: A rank or a neighbour failed. All worker processes are gone.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__()
        self.plan = plan
        #: is called with a line about the current activity
        self.tell: Callable[[str], None] = lambda _text: None
        self.summaries = {way: Summary() for way in plan.ways}
        #: operations of neighbours before the first save
        self.alone: list[Operation] = []
        self._folder = folder
        self._token = f"storm-{uuid.uuid4().hex[:16]}"
        self._ranks: list[Member] = []
        self._neighbours: list[Member] = []
        self._step = 0

    def __enter__(self) -> Storm:
        super().__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        plan = self.plan
        for way in plan.ways:
            (self._folder / way).mkdir()
        for rank in range(plan.ranks):
            work = members.rank(self.setup_of(rank))
            self._ranks.append(self.start(f"rank {rank}", work))
        small = self._folder / "neighbours"
        small.mkdir()
        members.prepare(small)
        for kind, count in (
            (members.reader, members.READERS),
            (members.writer, members.WRITERS),
        ):
            for number in range(count):
                name = f"neighbour {len(self._neighbours)}"
                self._neighbours.append(self.start(name, kind(small, number)))
        self.hear([*self._ranks, *self._neighbours], _READY_TIMEOUT_S)

    def setup_of(self, rank: int) -> RankSetup:
        """Return the setup of a rank. All ranks are on this host."""
        variables = members.launcher_variables(rank, self.plan.ranks, self._token)
        return RankSetup(rank, variables, self.plan.n_bytes, self._folder)

    def measure(self) -> None:
        """Run all rounds and fill `summaries`."""
        plan = self.plan
        self.tell("neighbours alone")
        self._wait_until_quiet()
        self._begin_neighbours()
        self.rest(ALONE_S)
        self.alone = self._end_neighbours()
        for way in plan.ways:
            self.tell(f"warming up: {way}")
            self.save_once(way)  # allocates buffers and opens connections; not counted
            self.remove(way)
        for number in range(plan.rounds):
            first = number % len(plan.ways)  # another way begins each round
            for way in plan.ways[first:] + plan.ways[:first]:
                self.tell(f"round {number + 1} of {plan.rounds}: {way}")
                self.summaries[way].rounds.append(self._round(way))

    def _round(self, way: str) -> Round:
        self._wait_until_quiet()
        self._begin_neighbours()
        found = self.save_once(way)
        end_ns = max(rank.end_ns for rank in found.ranks)
        operations = self._end_neighbours()
        self.remove(way)
        found.operations = [one for one in operations if found.at_ns <= one.at_ns < end_ns]
        return found

    def save_once(self, way: str) -> Round:
        """Let all ranks save once. The caller removes the files by remove()."""
        self._step += 1
        at_ns = time.monotonic_ns() + _AHEAD_NS + self.plan.ranks * 1_000_000
        order = Order(way, self._step, at_ns)
        return Round(way, at_ns, self.ask(self._ranks, _SAVE_TIMEOUT_S, order))

    def remove(self, way: str) -> None:
        """Remove the files that were saved in this way."""
        # Only step-*: a group keeps other files open beside them.
        for path in self._folder.glob(f"{way}/step-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _begin_neighbours(self) -> None:
        for member in self._neighbours:
            member.tell("begin")

    def _end_neighbours(self) -> list[Operation]:
        answers = self.ask(self._neighbours, _READY_TIMEOUT_S, "end")
        return [one for operations in answers for one in operations]

    def _wait_until_quiet(self) -> None:
        """Wait until the storage has completed earlier work."""
        members.sync_filesystem(self._folder)
        self.rest(_QUIET_S)
