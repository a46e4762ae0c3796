# SPDX-License-Identifier: Apache-2.0
"""A storm's rounds as timelines."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from ioshape.cli._output import human_size, plural
from ioshape.cli._storm_figures import Latency, Neighbours, RankSave, Ratios, Round
from ioshape.cli._svg import seconds
from ioshape.cli._timeline import Dot, Panel, Row, Save, Span, Timeline, spans_of
from ioshape.cli._ways import WAYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ioshape.cli._storm import Storm

_DETAILS = ("engine", "layout", "direct", "queue_depth", "coordinator", "capacity", "filesystem")


def of_typical_rounds(storm: Storm, filesystem: str) -> Timeline:
    """One round of each way: the one whose makespan is the median."""
    alone = Neighbours.of(storm.alone).reads
    panels = [_with_remarks(storm, summary.typical) for summary in storm.summaries.values()]
    plan = storm.plan
    return Timeline(
        _title(storm),
        panels,
        f"{plural(plan.ranks, 'rank')} save {human_size(plan.n_bytes)} each, at the same moment, "
        f"to {filesystem}",
        alone.p99_ms / 1e3 if alone else None,
    )


def of_all_rounds(storm: Storm) -> Timeline:
    """As they came, one after another."""
    rounds = [one for summary in storm.summaries.values() for one in summary.rounds]
    return Timeline("ioshape bench storm", [_panel(storm, one) for one in rounds])


def _title(storm: Storm) -> str:
    """What the best of ours is to the first way."""
    ways = list(storm.summaries)
    first, others = ways[0], ways[1:]
    if not others:
        return f"A storm: {WAYS[first]}"
    best = min(others, key=lambda way: storm.summaries[way].makespan_s)
    ratios = Ratios.of(storm.summaries[best], storm.summaries[first])
    parts = [
        f"done {_times(ratios.makespan)} sooner",
        f"the mean rank {_times(ratios.mean_completion)}",
    ]
    if ratios.reads_p99:
        parts.append(f"a neighbour's p99 {_times(ratios.reads_p99)}")
    return f"{WAYS[best]} against {WAYS[first]}: {', '.join(parts)}"


def _times(ratio: float) -> str:
    return (
        f"{ratio:.1f}\N{MULTIPLICATION SIGN}"
        if ratio < 9.95
        else f"{ratio:.0f}\N{MULTIPLICATION SIGN}"
    )


def _with_remarks(storm: Storm, turn: Round) -> Panel:
    panel = _panel(storm, turn)
    summary = storm.summaries[turn.way]
    # Of the round that is drawn, as far as it can be seen there.
    mean = fmean(rank.end_s for rank in turn.ranks)
    panel.remarks = [
        f"done after {seconds(turn.makespan_s)}",
        f"mean {seconds(mean)}",
        f"training held {seconds(summary.stall_s)}",
    ]
    reads: Latency | None = summary.neighbours.reads
    if reads:
        panel.remarks.append(f"99 % of a neighbour's reads within {seconds(reads.p99_ms / 1e3)}")
    return panel


def _panel(storm: Storm, turn: Round) -> Panel:
    name = WAYS[turn.way]
    return Panel(
        name,
        [
            Row(f"rank {number}", rank.pid, [_save(name, turn, rank)], rank=number)
            for number, rank in enumerate(turn.ranks)
        ],
        [
            Dot(one.kind, (one.at_ns - turn.at_ns) / 1e9, one.took_ns / 1e9)
            for one in turn.operations
        ],
        storm.epoch_s + turn.at_ns / 1e9,
    )


def _save(name: str, turn: Round, rank: RankSave) -> Save:
    if rank.report is None:
        spans: Sequence[Span] = [Span(*span) for span in rank.spans]
    else:
        spans = spans_of(rank.report, rank.begin_s, rank.end_s)
    details = {key: rank.report[key] for key in _DETAILS} if rank.report else {}
    return Save(
        f"{name}, round {turn.number}",
        rank.begin_s,
        rank.end_s,
        list(spans),
        rank.returned_s,
        {**details, "training_held_s": rank.stall_s},
    )
