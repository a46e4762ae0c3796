# SPDX-License-Identifier: Apache-2.0
"""Who did what when: what a storm measured and what reports tell, in one form to draw it from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: of a report, in the order in which they happen: the field, and the name of the phase
PARTS = (
    ("pickle_s", "stage"),
    ("stage_s", "stage"),
    ("slot_s", "wait"),
    ("plan_s", "plan"),
    ("write_s", "write"),
    ("sync_s", "sync"),
    ("commit_s", "commit"),
    ("group_s", "others"),
    ("drain_s", "drain"),
)

#: what each phase is, for the legend
PHASES = {
    "stage": "copies",
    "wait": "waits for its slot",
    "plan": "makes the file",
    "write": "writes",
    "sync": "syncs",
    "commit": "puts it in place",
    "others": "waits for other ranks",
    "drain": "is drained",
    "rest": "all else",
}


_LEAST_REST = 0.01  # of a save


class Span(NamedTuple):
    """A part of a save; seconds on the panel's clock."""

    phase: str
    begin_s: float
    end_s: float


@dataclass
class Save:
    """One save of one rank."""

    name: str
    begin_s: float
    end_s: float
    spans: list[Span]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """One process."""

    label: str
    pid: int
    saves: list[Save]
    host: str = ""
    rank: int = 0

    @property
    def end_s(self) -> float:
        return max(save.end_s for save in self.saves)


class Dot(NamedTuple):
    """A neighbour's operation."""

    kind: str
    at_s: float
    took_s: float


@dataclass
class Panel:
    """What happened together."""

    title: str
    rows: list[Row]
    dots: list[Dot] = field(default_factory=list)
    #: 0 of its clock, in seconds since 1970
    epoch_s: float = 0.0
    #: to be said beside the title
    remarks: list[str] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return max((row.end_s for row in self.rows), default=0.0)


@dataclass
class Timeline:
    """Panels, one over another, on one axis."""

    title: str
    panels: list[Panel]
    subtitle: str = ""
    #: the 99th percentile of neighbours' reads when nobody saves
    alone_s: float | None = None


def spans_of(report: Mapping[str, Any], begin_s: float, end_s: float) -> list[Span]:
    """The parts one after another. What is less than a thousandth of it all is left out."""
    spans: list[Span] = []
    at = begin_s
    least = (end_s - begin_s) / 1000
    for name, phase in PARTS:
        seconds = float(report.get(name) or 0.0)
        until = min(at + seconds, end_s)
        if until - at > least:
            if spans and spans[-1].phase == phase:
                spans[-1] = spans[-1]._replace(end_s=until)
            else:
                spans.append(Span(phase, at, until))
        at = until
    # The time of no part, such as starting a thread: a bar ends when its save does.
    if end_s - at > _LEAST_REST * (end_s - begin_s):
        spans.append(Span("rest", at, end_s))
    return spans
