# SPDX-License-Identifier: Apache-2.0
"""What a storm's measurements say: how long, how evenly, and what neighbours had of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ioshape.cli._neighbours import READ, WRITE, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of them that so many percent do not exceed; nothing is interpolated."""
    if not values:
        raise ValueError("there are no values to take a percentile of")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass
class RankSave:
    """What one rank did in one round; times are in seconds since all were told to save."""

    begin_s: float
    #: when the training thread went on
    returned_s: float
    end_s: float
    #: the report as a dictionary; None of torch.save
    report: dict[str, Any] | None
    #: (phase, begin, end), where it was not told by a report
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    pid: int = 0

    @property
    def stall_s(self) -> float:
        return self.returned_s - self.begin_s


@dataclass
class Round:
    """All ranks once, in one way."""

    way: str
    number: int
    #: when they were told to save, by now_ns()
    at_ns: int
    ranks: list[RankSave]
    #: of neighbours, begun while ranks were saving
    operations: list[Operation]

    @property
    def makespan_s(self) -> float:
        return max(rank.end_s for rank in self.ranks)


@dataclass
class Latency:
    """Of a neighbour's operations; milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    most_ms: float

    @classmethod
    def of(cls, operations: Sequence[Operation], kind: str) -> Latency | None:
        took = [one.took_ns / 1e6 for one in operations if one.kind == kind]
        if not took:
            return None
        return cls(len(took), percentile(took, 50), percentile(took, 99), max(took))


@dataclass
class Neighbours:
    """What they noticed."""

    reads: Latency | None
    writes: Latency | None

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> Neighbours:
        return cls(Latency.of(operations, READ), Latency.of(operations, WRITE))


@dataclass
class Summary:
    """All rounds of one way."""

    rounds: list[Round] = field(default_factory=list)
    #: of one round without neighbours; None where the filesystem does not tell
    metadata: dict[str, int] | None = None
    #: that stock torch has read back, and found right
    checked_bytes: int = 0

    @property
    def makespan_s(self) -> float:
        """The median of the rounds."""
        return median(one.makespan_s for one in self.rounds)

    @property
    def mean_completion_s(self) -> float:
        """The median of the rounds' means over ranks."""
        return median(fmean(rank.end_s for rank in one.ranks) for one in self.rounds)

    @property
    def p99_completion_s(self) -> float:
        """Over the ranks of all rounds."""
        return percentile([rank.end_s for one in self.rounds for rank in one.ranks], 99)

    @property
    def stall_s(self) -> float:
        """How long a training thread is held: the median of the rounds' means over ranks."""
        return median(fmean(rank.stall_s for rank in one.ranks) for one in self.rounds)

    @property
    def most_stall_s(self) -> float:
        """The same of the rank that is held longest."""
        return median(max(rank.stall_s for rank in one.ranks) for one in self.rounds)

    @property
    def neighbours(self) -> Neighbours:
        """Over the operations of all rounds."""
        return Neighbours.of([one for turn in self.rounds for one in turn.operations])

    @property
    def metadata_operations(self) -> int | None:
        return None if self.metadata is None else sum(self.metadata.values())

    @property
    def typical(self) -> Round:
        """The round whose makespan is the median, or the next above it."""
        ordered = sorted(self.rounds, key=lambda one: one.makespan_s)
        return ordered[len(ordered) // 2]


@dataclass
class Ratios:
    """One way against another: more than 1 is better than the other."""

    makespan: float
    mean_completion: float
    p99_completion: float
    stall: float
    reads_p99: float | None
    writes_p99: float | None
    metadata: float | None

    @classmethod
    def of(cls, ours: Summary, theirs: Summary) -> Ratios:
        def latency(kind: str) -> float | None:
            mine: Latency | None = getattr(ours.neighbours, kind)
            other: Latency | None = getattr(theirs.neighbours, kind)
            return other.p99_ms / mine.p99_ms if mine and other else None

        return cls(
            theirs.makespan_s / ours.makespan_s,
            theirs.mean_completion_s / ours.mean_completion_s,
            theirs.p99_completion_s / ours.p99_completion_s,
            theirs.stall_s / ours.stall_s,
            latency("reads"),
            latency("writes"),
            theirs.metadata_operations / ours.metadata_operations
            if theirs.metadata_operations and ours.metadata_operations
            else None,
        )
