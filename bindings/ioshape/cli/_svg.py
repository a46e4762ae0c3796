# SPDX-License-Identifier: Apache-2.0
"""A timeline as a picture: SVG, without scripts, for light and dark pages."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from ioshape.cli._timeline import PHASES, Dot, Panel, Row, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable

_WIDTH = 1080
_LEFT, _RIGHT = 86, 24
_PLOT = _WIDTH - _LEFT - _RIGHT
_HEADER = 96
_PANEL_HEAD = 26
_AXIS = 26
_STRIP = 78
_GAP = 26
_MOST_ROWS = 512
_MOST_DOTS = 5000
_LABELLED_ROWS = 20

_STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#24292f}
.card{fill:#fff}
.title{font-size:15px;font-weight:600}.head{font-size:13px;font-weight:600}
.dim{fill:#57606a}.small{font-size:10.5px}.grid{stroke:#d8dee4;stroke-width:1}
.end{stroke:#24292f;stroke-width:1;stroke-dasharray:3 3}
.alone{stroke:#cf4446;stroke-width:1;stroke-dasharray:5 4}
.stage{fill:#8250df}.wait{fill:#dbe0e6}.plan{fill:#1b9e9e}.write{fill:#2f7ed8}.sync{fill:#f0932b}
.commit{fill:#3fa34d}.others{fill:#b9cbe4}
.reads,.writes{fill:none;stroke-linecap:round}
.reads{stroke:#cf4446;stroke-width:3}.writes{stroke:#9a7b1f;stroke-width:3}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.card{fill:#0d1117}.dim{fill:#9aa4af}
.grid{stroke:#30363d}.end{stroke:#e6edf3}.wait{fill:#3d444d}.others{fill:#4a5f80}}
"""


def draw(timeline: Timeline) -> str:
    """The whole picture."""
    longest = max((_end_of(panel) for panel in timeline.panels), default=0.0) or 1e-3
    scale = _PLOT / (longest * 1.02)
    parts: list[str] = []
    y = float(_HEADER)
    for panel in timeline.panels:
        lines, height = _panel(panel, y, scale, longest, timeline.alone_s)
        parts += lines
        y += height + _GAP
    height = math.ceil(y - _GAP + 12)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>{_text(timeline.title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="card" width="{_WIDTH}" height="{height}" rx="8"/>',
            *_header(timeline),
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(text: str) -> str:
    # XML takes no control characters, not even escaped.
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))


def _n(number: float) -> str:
    """As short as it can be told."""
    return f"{number:.1f}".rstrip("0").rstrip(".") or "0"


def seconds(value: float) -> str:
    """Three digits and a unit."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms"


def _end_of(panel: Panel) -> float:
    # A neighbour's operation that began while ranks were saving may end long after them.
    return max([panel.end_s, *(dot.at_s + dot.took_s for dot in panel.dots)])


def _header(timeline: Timeline) -> Iterable[str]:
    yield f'<text class="title" x="20" y="28">{_text(timeline.title)}</text>'
    yield f'<text class="dim" x="20" y="48">{_text(timeline.subtitle)}</text>'
    there = {
        span.phase
        for panel in timeline.panels
        for row in panel.rows
        for save in row.saves
        for span in save.spans
    }
    x = 20.0
    for phase, label in PHASES.items():
        if phase in there:
            yield f'<rect class="{phase}" x="{_n(x)}" y="63" width="12" height="12" rx="2"/>'
            yield f'<text class="small" x="{_n(x + 17)}" y="73">{label}</text>'
            x += 32 + 5.6 * len(label)
    kinds = {dot.kind for panel in timeline.panels for dot in panel.dots}
    for kind, style in (("read", "reads"), ("write", "writes")):
        if kind in kinds:
            label = f"neighbour {kind}s"
            yield f'<path class="{style}" d="M{_n(x + 3)} 69h6"/>'
            yield f'<text class="small" x="{_n(x + 17)}" y="73">{label}</text>'
            x += 32 + 5.6 * len(label)
    if timeline.alone_s:
        label = f"99 % of reads when nobody saves: {seconds(timeline.alone_s)}"
        yield f'<path class="alone" d="M{_n(x)} 69h14"/>'
        yield f'<text class="small" x="{_n(x + 19)}" y="73">{label}</text>'


def _row_height(count: int) -> float:
    return 14.0 if count <= _LABELLED_ROWS else max(2.0, min(10.0, 320 / count))


def _panel(
    panel: Panel, top: float, scale: float, longest: float, alone_s: float | None
) -> tuple[list[str], float]:
    # In this order a convoy looks like one.
    rows = sorted(panel.rows, key=lambda row: (row.end_s, row.rank))
    left_out = len(rows) - _MOST_ROWS
    rows = rows[:_MOST_ROWS]
    each = _row_height(len(rows))
    first = top + _PANEL_HEAD
    bottom = first + each * len(rows)
    strip = bottom + 8 if panel.dots else bottom
    end = strip + _STRIP if panel.dots else bottom
    lines = [_heading(panel, top)]
    lines += _axis(first, end, scale, longest)
    for number, row in enumerate(rows):
        lines += _row(row, first + number * each, each, scale, labelled=len(rows) <= _LABELLED_ROWS)
    if len(rows) > _LABELLED_ROWS:
        lines += _caption(len(panel.rows), (first + bottom) / 2)
    if left_out > 0:
        lines.append(
            f'<text class="small dim" x="{_LEFT}" y="{_n(bottom + 4)}">and {left_out} more</text>'
        )
    if panel.dots:
        lines += _neighbours(panel.dots, strip, scale, alone_s)
    x = _LEFT + panel.end_s * scale
    lines.append(f'<path class="end" d="M{_n(x)} {_n(first - 3)}V{_n(end)}"/>')
    return lines, end + _AXIS - top


def _heading(panel: Panel, top: float) -> str:
    remarks = "".join(
        f'<tspan class="dim" font-weight="400" dx="14">{_text(remark)}</tspan>'
        for remark in panel.remarks
    )
    return f'<text class="head" x="20" y="{_n(top + 12)}">{_text(panel.title)}{remarks}</text>'


def _caption(count: int, middle: float) -> Iterable[str]:
    for i, text in enumerate((f"{count} ranks,", "the first to", "end on top")):
        y = middle + (i - 1) * 14
        yield f'<text class="small dim" text-anchor="end" x="{_LEFT - 8}" y="{_n(y)}">{text}</text>'


def _step(longest: float) -> float:
    """About ten of these are the axis."""
    rough = longest / 10
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= rough * 0.999)


def _axis(top: float, bottom: float, scale: float, longest: float) -> Iterable[str]:
    step = _step(longest)
    unit, factor = ("s", 1.0) if longest >= 0.5 else ("ms", 1e3)
    for i in range(math.floor(longest / step + 1e-6) + 1):
        x = _LEFT + i * step * scale
        label = f"{i * step * factor:.6g}"
        yield f'<path class="grid" d="M{_n(x)} {_n(top)}V{_n(bottom + 4)}"/>'
        yield (
            f'<text class="small dim" text-anchor="middle" x="{_n(x)}" y="{_n(bottom + 17)}">'
            f"{label}{' ' + unit if not i else ''}</text>"
        )


def _row(row: Row, y: float, each: float, scale: float, *, labelled: bool) -> Iterable[str]:
    thick = max(each - (3 if each > 8 else 1 if each > 3 else 0), 1.0)
    words: list[str] = []
    boxes: list[str] = []
    for save in row.saves:
        for span in save.spans:
            width = max((span.end_s - span.begin_s) * scale, 0.4)
            boxes.append(
                f'<rect class="{span.phase}" x="{_n(_LEFT + span.begin_s * scale)}" y="{_n(y)}" '
                f'width="{_n(width)}" height="{_n(thick)}"/>'
            )
            if len(words) < 12:
                words.append(f"{span.phase} {seconds(span.end_s - span.begin_s)}")
    yield f"<g><title>{_text(row.label)}: {', '.join(words)}</title>"
    yield from boxes
    yield "</g>"
    if labelled:
        yield (
            f'<text class="small dim" text-anchor="end" x="{_LEFT - 8}" '
            f'y="{_n(y + each - 4.5)}">{_text(row.label)}</text>'
        )


def _neighbours(dots: list[Dot], top: float, scale: float, alone_s: float | None) -> Iterable[str]:
    """How long each took, on a scale of powers of ten; as wide as it was long."""
    took = [max(dot.took_s, 1e-5) for dot in dots] + ([alone_s] if alone_s else [])
    low = math.floor(math.log10(min(took)))
    high = max(math.ceil(math.log10(max(took))), low + 1)
    inner = _STRIP - 8

    def height_of(value: float) -> float:
        share = (math.log10(max(value, 1e-5)) - low) / (high - low)
        return top + inner - share * (inner - 8)

    for power in range(low, high + 1):
        y = height_of(10.0**power)
        yield f'<path class="grid" d="M{_LEFT} {_n(y)}H{_LEFT + _PLOT}"/>'
        yield (
            f'<text class="small dim" text-anchor="end" x="{_LEFT - 8}" y="{_n(y + 3.5)}">'
            f"{seconds(10.0**power)}</text>"
        )
    for kind, style in (("write", "writes"), ("read", "reads")):
        # Of too many, evenly spread ones.
        some = [dot for dot in dots if dot.kind == kind]
        some = some[:: max(1, -(-len(some) // _MOST_DOTS))]
        if some:
            path = "".join(
                f"M{_n(_LEFT + dot.at_s * scale)} {_n(height_of(dot.took_s))}"
                f"h{_n(dot.took_s * scale)}"
                for dot in some
            )
            yield f'<path class="{style}" d="{path}"/>'
    if alone_s:
        y = height_of(alone_s)
        yield f'<path class="alone" d="M{_LEFT} {_n(y)}H{_LEFT + _PLOT}"/>'
