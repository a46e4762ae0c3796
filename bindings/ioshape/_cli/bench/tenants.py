# SPDX-License-Identifier: Apache-2.0
"""The verdict of "ioshape bench --tenants": what slots change for jobs and their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from ioshape._cli.bench.measure import Latency
from ioshape._cli.output import Table, columns, human_seconds, human_size, say

if TYPE_CHECKING:
    from ioshape._cli.bench.measure import Round, Storm

#: operations; of fewer, p99 is the longest
_ENOUGH = 100


@dataclass
class Side:
    """The results of one half of the rounds, without slots or with them."""

    #: of all jobs together
    bytes_per_s: float
    #: until all ranks of a job have saved: the mean of the jobs, the median of the rounds
    checkpoint_s: float
    #: of a neighbour's reads and creations; None if the saves were too short for one
    operations: Latency | None


@dataclass
class Verdict:
    """Both sides, and what they are to each other: ratios above 1 are in favour of slots."""

    idle: Latency | None
    without: Side
    with_slots: Side
    #: bytes per second, with slots to without
    aggregate: float
    #: p99 of neighbours, without slots to with
    p99: float | None
    sentence: str

    @classmethod
    def of(cls, storm: Storm) -> Verdict:
        """Compare the two ways of a storm: the first without slots, the second with them."""
        without, with_slots = (_side(storm, way) for way in storm.plan.ways)
        before, after = without.operations, with_slots.operations
        return cls(
            Latency.of(storm.alone),
            without,
            with_slots,
            with_slots.bytes_per_s / without.bytes_per_s,
            before.p99_ms / after.p99_ms if before and after else None,
            _sentence(without, with_slots),
        )

    def show(self) -> None:
        """Print the table and the sentences."""
        table = Table(
            *columns("<", ">together", ">checkpoint", ">neighbours p50", ">p99", ">operations")
        )
        table.add("no saves", "-", "-", *_waits(self.idle))
        sides = {"without slots": self.without, "with slots": self.with_slots}
        for label, side in sides.items():
            rate = f"{human_size(side.bytes_per_s)}/s"
            table.add(label, rate, human_seconds(side.checkpoint_s), *_waits(side.operations))
        table.show()
        say()
        say(self.sentence)
        say(
            f"Together the jobs save {self.aggregate:.2f} times as much in a second with slots as "
            "without."
        )
        if any(one.operations is None or one.operations.count < _ENOUGH for one in sides.values()):
            say(
                "Too few reads and creations were measured for a p99; choose a larger --size or "
                "more --rounds."
            )


def _waits(latency: Latency | None) -> list[str]:
    if latency is None:
        return ["-", "-", "0"]
    times = [human_seconds(ms / 1e3) for ms in (latency.p50_ms, latency.p99_ms)]
    return [*times, f"{latency.count:,}"]


def _side(storm: Storm, way: str) -> Side:
    plan, summary = storm.plan, storm.summaries[way]
    return Side(
        plan.all_ranks * plan.n_bytes / summary.makespan_s,
        median(fmean(_checkpoints_s(one, plan.ranks)) for one in summary.rounds),
        Latency.of([one for turn in summary.rounds for one in turn.operations]),
    )


def _checkpoints_s(turn: Round, ranks: int) -> list[float]:
    """Return for each job the time until its last rank has saved."""
    ends = turn.completions_s
    return [max(ends[first : first + ranks]) for first in range(0, len(ends), ranks)]


def _sentence(without: Side, with_slots: Side) -> str:
    before, after = without.operations, with_slots.operations
    checkpoint = (
        f"your checkpoint takes {human_seconds(with_slots.checkpoint_s)} instead of "
        f"{human_seconds(without.checkpoint_s)}."
    )
    if before is None or after is None:
        return f"With slots {checkpoint}"
    return (
        f"With slots your neighbours wait {human_seconds(after.p99_ms / 1e3)} instead of "
        f"{human_seconds(before.p99_ms / 1e3)}; {checkpoint}"
    )
