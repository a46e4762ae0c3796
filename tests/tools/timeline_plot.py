# SPDX-License-Identifier: Apache-2.0
"""Draws timelines of ranks that save, as in docs/storm-cephfs.svg.

It needs matplotlib. Users open the traces of "ioshape trace --chrome" in Perfetto instead.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ioshape._cli.output import human_seconds
from ioshape._cli.trace import PHASES, Span

_COLOURS = {
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
_DONE = (0, (3, 3))
_DOTS = {"read": "#cf4446", "write": "#9a7b1f"}
_MOST_ROWS = 512
_MOST_DOTS = 5000
_LABELLED_ROWS = 20
_WIDTH = 11.0  # inches, as all of these
_HEADER = 1.1
_STRIP = 1.0
_PANEL_HEAD = 0.7


@dataclass
class Save:
    """A save of a rank."""

    begin_s: float
    end_s: float
    spans: list[Span]


@dataclass
class Row:
    """A process."""

    label: str
    saves: list[Save]
    rank: int = 0

    @property
    def end_s(self) -> float:
        return max(save.end_s for save in self.saves)


class Dot(NamedTuple):
    """An operation of a neighbour."""

    kind: str
    at_s: float
    took_s: float


@dataclass
class Panel:
    """Saves and operations that happened together."""

    title: str
    rows: list[Row]
    dots: list[Dot] = field(default_factory=list)
    #: shown beside the title
    remarks: list[str] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return max((row.end_s for row in self.rows), default=0.0)


@dataclass
class Timeline:
    """Panels, one above another, with a common axis."""

    title: str
    panels: list[Panel]
    subtitle: str = ""
    #: the 99th percentile of neighbours' reads without saves
    alone_s: float | None = None


def draw(timeline: Timeline, path: str) -> None:
    """Write the picture. The path's suffix determines its format."""
    from matplotlib import rc_context  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    heights = [height for panel in timeline.panels for height in _heights(panel)]
    size = (_WIDTH, _HEADER + sum(heights) + _PANEL_HEAD * len(timeline.panels))
    style = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}
    # With a salt and without a date, the pictures of equal timelines are identical.
    with rc_context({**style, "svg.hashsalt": "ioshape"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that no font has
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[
            :, 0
        ]
        left = list(all_axes)
        for panel in timeline.panels:
            _draw_rows(left.pop(0), panel)
            if panel.dots:
                _draw_dots(left.pop(0), panel, timeline)
        all_axes[-1].set_xlabel("seconds")
        all_axes[-1].set_xlim(left=0)
        title = "\n".join((timeline.title, timeline.subtitle))
        figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        figure.legend(handles=_legend(timeline), loc="outside lower left", ncols=6, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def _heights(panel: Panel) -> list[float]:
    count = min(len(panel.rows), _MOST_ROWS)
    rows = 0.16 * count if count <= _LABELLED_ROWS else max(3.2, 0.02 * count)
    return [max(rows, 0.4), _STRIP] if panel.dots else [max(rows, 0.4)]


def _draw_rows(axes: Any, panel: Panel) -> None:
    # Sorted by their end, so that a convoy looks like one.
    rows = sorted(panel.rows, key=lambda row: (row.end_s, row.rank))[:_MOST_ROWS]
    for phase, colour in _COLOURS.items():
        bars = [
            (number, span.begin_s, span.end_s - span.begin_s)
            for number, row in enumerate(rows)
            for save in row.saves
            for span in save.spans
            if span.phase == phase
        ]
        if bars:
            y, begin, width = zip(*bars, strict=True)
            axes.barh(y, width, left=begin, height=0.85, color=colour, linewidth=0)
    axes.axvline(panel.end_s, color="black", linewidth=0.8, linestyle=_DONE)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _label(axes, rows, len(panel.rows))
    title = "   ".join([panel.title, *panel.remarks])
    axes.set_title(title, loc="left", fontsize=9, parse_math=False)


def _label(axes: Any, rows: list[Row], count: int) -> None:
    if count <= _LABELLED_ROWS:
        labels = [row.label for row in rows]
        axes.set_yticks(range(len(rows)), labels, parse_math=False)
    else:
        more = f",\nand {count - len(rows)} more" if count > len(rows) else ""
        axes.set_yticks([])
        axes.set_ylabel(f"{len(rows)} ranks, the\nfirst to end on top{more}")


def _draw_dots(axes: Any, panel: Panel, timeline: Timeline) -> None:
    """Draw the duration of each operation of neighbours, as a line of that length."""
    for kind, colour in _DOTS.items():
        dots = [dot for dot in panel.dots if dot.kind == kind]
        dots = dots[:: max(1, -(-len(dots) // _MOST_DOTS))]  # evenly spread, if there are too many
        axes.hlines(
            [dot.took_s for dot in dots],
            [dot.at_s for dot in dots],
            [dot.at_s + dot.took_s for dot in dots],
            colors=colour,
            linewidth=2,
        )
    if timeline.alone_s:
        axes.axhline(timeline.alone_s, color=_DOTS["read"], linewidth=0.8, linestyle=(0, (5, 4)))
    took = [dot.took_s for one in timeline.panels for dot in one.dots]
    axes.set_yscale("log")
    axes.set_ylim(min(took) / 2, max(took) * 2)  # equal in all panels
    axes.yaxis.set_major_formatter(lambda value, _position: human_seconds(value))
    axes.set_ylabel("neighbours")
    axes.grid(axis="y", color="#d8dee4", linewidth=0.6)


def _legend(timeline: Timeline) -> list[Any]:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    spans = {
        span.phase
        for panel in timeline.panels
        for row in panel.rows
        for save in row.saves
        for span in save.spans
    }
    kinds = {dot.kind for panel in timeline.panels for dot in panel.dots}
    entries: list[Any] = [
        Patch(color=_COLOURS[phase], label=label)
        for phase, label in PHASES.items()
        if phase in spans
    ]
    entries += [
        Line2D([], [], color=colour, linewidth=2, label=f"a neighbour's {kind}")
        for kind, colour in _DOTS.items()
        if kind in kinds
    ]
    done = "all ranks are done"
    entries.append(Line2D([], [], color="black", linewidth=0.8, linestyle=_DONE, label=done))
    if timeline.alone_s:
        label = f"99 % of reads when nobody saves: {human_seconds(timeline.alone_s)}"
        entries.append(Line2D([], [], color=_DOTS["read"], linestyle=(0, (5, 4)), label=label))
    return entries
