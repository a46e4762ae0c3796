# SPDX-License-Identifier: Apache-2.0
"""Draw a storm, as in docs/storm-cephfs.svg: of each way the round with the median makespan.

It needs matplotlib. Users open the traces of "ioshape trace --chrome" in Perfetto instead.
"""

import warnings
from statistics import fmean
from typing import Any, NamedTuple

from ioshape._cli.bench import WAYS, filesystem, who_saves
from ioshape._cli.bench_measure import Neighbours, Ratios, Round, Storm, Summary
from ioshape._cli.bench_members import Saved
from ioshape._cli.output import human_seconds
from ioshape._cli.trace import PHASES, Span, spans_of

COLOURS = {
    "stage": "#8250df",
    "wait": "#dbe0e6",
    "plan": "#1b9e9e",
    "write": "#2f7ed8",
    "sync": "#f0932b",
    "commit": "#3fa34d",
    "others": "#b9cbe4",
    "drain": "#c59bd6",
    "rest": "#a8b1bb",
}
DONE = (0, (3, 3))
ALONE = (0, (5, 4))
OPERATIONS = {"read": "#cf4446", "write": "#9a7b1f"}
LABELLED_ROWS = 20
WIDTH = 11.0  # inches, as all of these
HEADER = 1.1
STRIP = 1.0
PANEL_HEAD = 0.7


class Row(NamedTuple):
    """A rank. Rows are in the order of their ends, so that a convoy looks like one."""

    end_s: float
    number: int
    label: str
    spans: list[Span]


class Operation(NamedTuple):
    """An operation of a neighbour."""

    kind: str
    at_s: float
    took_s: float


class Panel(NamedTuple):
    """A round: the saves of all ranks, and operations that began meanwhile."""

    title: str
    rows: list[Row]
    operations: list[Operation]

    @property
    def height(self) -> float:
        count = len(self.rows)
        return max(0.16 * count if count <= LABELLED_ROWS else max(3.2, 0.02 * count), 0.4)


# ---- What is drawn -------------------------------------------------------------------------------


def title_of(storm: Storm) -> str:
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
    return ", ".join(f"{what} {faster(ratio)}" for what, ratio in parts if ratio)


def faster(ratio: float) -> str:
    times = max(ratio, 1 / ratio)
    if times < 1.05:
        return "as fast"
    text = f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
    return f"{text}\N{MULTIPLICATION SIGN} {'faster' if ratio > 1 else 'slower'}"


def panel_of(way: str, summary: Summary) -> Panel:
    turn = summary.typical
    reads = summary.neighbours.reads
    title = [
        WAYS[way],
        f"done after {human_seconds(turn.makespan_s)}",
        f"mean {human_seconds(fmean(turn.completions_s))}",
        f"training held {human_seconds(summary.stall_s)}",
    ]
    if reads:
        title.append(f"99 % of a neighbour's reads within {human_seconds(reads.p99_ms / 1e3)}")
    rows = [row_of(turn, number, rank) for number, rank in enumerate(turn.ranks)]
    operations = [
        Operation(one.kind, (one.at_ns - turn.at_ns) / 1e9, one.took_ns / 1e9)
        for one in turn.operations
    ]
    return Panel("   ".join(title), sorted(rows), operations)


def row_of(turn: Round, number: int, rank: Saved) -> Row:
    def seconds(moment_ns: int) -> float:
        return (moment_ns - turn.at_ns) / 1e9

    begin_s, end_s = seconds(rank.begin_ns), seconds(rank.end_ns)
    if rank.report is None:
        spans = [Span(phase, seconds(a), seconds(b)) for phase, a, b in rank.spans]
    else:
        spans = spans_of(rank.report, begin_s, end_s)
    return Row(end_s, number, f"rank {number}", spans)


# ---- The picture ---------------------------------------------------------------------------------


def draw(storm: Storm, path: str) -> None:
    """Write the picture. The path's suffix determines its format."""
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    plan = storm.plan
    alone = Neighbours.of(storm.alone).reads
    alone_s = alone.p99_ms / 1e3 if alone else None
    panels = [panel_of(way, summary) for way, summary in storm.summaries.items()]
    took = [one.took_s for panel in panels for one in panel.operations]
    heights = [height for panel in panels for height in (panel.height, STRIP)]
    size = (WIDTH, HEADER + sum(heights) + PANEL_HEAD * len(panels))
    style = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}
    # With a salt and without a date, the pictures of equal storms are identical.
    with rc_context({**style, "svg.hashsalt": "ioshape"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that no font has
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        for panel, rows, strip in zip(panels, axes[::2], axes[1::2], strict=True):
            draw_rows(rows, panel)
            draw_operations(strip, panel, alone_s)
            strip.set_ylim(min(took) / 2, max(took) * 2)  # equal in all panels
        axes[-1].set_xlabel("seconds")
        axes[-1].set_xlim(left=0)
        saves = who_saves(plan.ranks, plan.n_bytes)
        title = f"{title_of(storm)}\n{saves}, at the same moment, to {filesystem(storm)}"
        figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        handles = legend(panels, alone_s)
        figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def draw_rows(axes: Any, panel: Panel) -> None:
    for phase, colour in COLOURS.items():
        bars = [
            (number, span.begin_s, span.end_s - span.begin_s)
            for number, row in enumerate(panel.rows)
            for span in row.spans
            if span.phase == phase
        ]
        if bars:
            y, begin, width = zip(*bars, strict=True)
            axes.barh(y, width, left=begin, height=0.85, color=colour, linewidth=0)
    axes.axvline(panel.rows[-1].end_s, color="black", linewidth=0.8, linestyle=DONE)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    if len(panel.rows) <= LABELLED_ROWS:
        labels = [row.label for row in panel.rows]
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(panel.rows)} ranks, the\nfirst to end on top")
    axes.set_title(panel.title, loc="left", fontsize=9, parse_math=False)


def draw_operations(axes: Any, panel: Panel, alone_s: float | None) -> None:
    """Draw the duration of each operation of neighbours, as a line of that length."""
    for kind, colour in OPERATIONS.items():
        found = [one for one in panel.operations if one.kind == kind]
        axes.hlines(
            [one.took_s for one in found],
            [one.at_s for one in found],
            [one.at_s + one.took_s for one in found],
            colors=colour,
            linewidth=2,
        )
    if alone_s:
        axes.axhline(alone_s, color=OPERATIONS["read"], linewidth=0.8, linestyle=ALONE)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _position: human_seconds(value))
    axes.set_ylabel("neighbours")
    axes.grid(axis="y", color="#d8dee4", linewidth=0.6)


def legend(panels: list[Panel], alone_s: float | None) -> list[Any]:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    phases = {span.phase for panel in panels for row in panel.rows for span in row.spans}
    entries: list[Any] = [
        Patch(color=COLOURS[phase], label=label)
        for phase, label in PHASES.items()
        if phase in phases
    ]
    entries += [
        Line2D([], [], color=colour, linewidth=2, label=f"a neighbour's {kind}")
        for kind, colour in OPERATIONS.items()
    ]
    done = "all ranks are done"
    entries.append(Line2D([], [], color="black", linewidth=0.8, linestyle=DONE, label=done))
    if alone_s:
        label = f"99 % of reads without saves: {human_seconds(alone_s)}"
        entries.append(Line2D([], [], color=OPERATIONS["read"], linestyle=ALONE, label=label))
    return entries
