# SPDX-License-Identifier: Apache-2.0
"""Make a timeline of a storm. It shows one round of each way: that with the median makespan."""

from statistics import fmean

from ioshape._cli.bench import WAYS, filesystem, who_saves
from ioshape._cli.bench_measure import Neighbours, Plan, Ratios, Round, Storm, Summary
from ioshape._cli.bench_members import Saved
from ioshape._cli.output import human_seconds
from ioshape._cli.trace import Span, spans_of
from timeline_plot import Dot, Panel, Row, Save, Timeline


def timeline_of(storm: Storm) -> Timeline:
    """Return the timeline, ready to be drawn."""
    plan = storm.plan
    alone = Neighbours.of(storm.alone).reads
    return Timeline(
        _title(storm),
        [_panel(plan, way, summary) for way, summary in storm.summaries.items()],
        f"{who_saves(plan.tenants, plan.ranks, plan.n_bytes)}, at the same moment, to "
        f"{filesystem(storm)}",
        alone.p99_ms / 1e3 if alone else None,
    )


def _title(storm: Storm) -> str:
    """Return a title that compares the best other way with the first way."""
    first, *others = storm.plan.ways
    if not others:
        return f"A storm: {WAYS[first]}"
    best = min(others, key=lambda way: storm.summaries[way].makespan_s)
    return f"{WAYS[best]} against {WAYS[first]}: " + compared(
        Ratios.of(storm.summaries[best], storm.summaries[first])
    )


def compared(ratios: Ratios) -> str:
    """Return the ratios in words. A ratio below 1 is called slower."""
    parts = [
        ("all ranks done", ratios.makespan),
        ("the mean rank", ratios.mean_completion),
        ("a neighbour's p99 read", ratios.reads_p99),
    ]
    return ", ".join(f"{what} {_faster(ratio)}" for what, ratio in parts if ratio)


def _faster(ratio: float) -> str:
    times = max(ratio, 1 / ratio)
    if times < 1.05:
        return "as fast"
    text = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
    return f"{text}\N{MULTIPLICATION SIGN} {'faster' if ratio > 1 else 'slower'}"


def _panel(plan: Plan, way: str, summary: Summary) -> Panel:
    turn = summary.typical
    reads = summary.neighbours.reads
    remarks = [
        f"done after {human_seconds(turn.makespan_s)}",
        f"mean {human_seconds(fmean(turn.completions_s))}",
        f"training held {human_seconds(summary.stall_s)}",
    ]
    if reads:
        remarks.append(f"99 % of a neighbour's reads within {human_seconds(reads.p99_ms / 1e3)}")
    rows = [
        Row(plan.name_of(number), [_save(turn, rank)], number)
        for number, rank in enumerate(turn.ranks)
    ]
    dots = [
        Dot(one.kind, (one.at_ns - turn.at_ns) / 1e9, one.took_ns / 1e9) for one in turn.operations
    ]
    return Panel(WAYS[way], rows, dots, remarks=remarks)


def _save(turn: Round, rank: Saved) -> Save:
    def seconds(moment_ns: int) -> float:
        return (moment_ns - turn.at_ns) / 1e9

    begin_s, end_s = seconds(rank.begin_ns), seconds(rank.end_ns)
    if rank.report is None:
        spans = [Span(phase, seconds(a), seconds(b)) for phase, a, b in rank.spans]
    else:
        spans = spans_of(rank.report, begin_s, end_s)
    return Save(begin_s, end_s, spans)
