# SPDX-License-Identifier: Apache-2.0
"""A timeline as a trace of Chrome's kind, which Perfetto opens, on the clock of torch's profiler.

torch's profiler writes microseconds since "baseTimeNanoseconds", which is the last multiple of a
quarter of a year since 1970. With the same base, slices of both lie right in one view.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ioshape.cli.trace.timeline import PHASES, Panel, Row, Save, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterable

QUARTER_S = 7_889_238
#: threads of ours, beside those that the profiler shows of the same process
_FIRST_THREAD = 1_000_000_001
#: more than a kernel counts up to
_NEXT_HOST = 10_000_000


def write(timeline: Timeline) -> str:
    """The whole trace, as JSON."""
    earliest = min((panel.epoch_s for panel in timeline.panels), default=0.0)
    base_s = int(earliest) // QUARTER_S * QUARTER_S
    events: list[dict[str, Any]] = []
    pids = _Pids()
    named: set[tuple[int, int, str]] = set()
    for panel in timeline.panels:
        for event in _panel(panel, (panel.epoch_s - base_s) * 1e6, pids):
            if event["ph"] == "M":
                key = (event["pid"], event["tid"], event["name"])
                if key in named:
                    continue
                named.add(key)
            events.append(event)
    return json.dumps(
        {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_s * 10**9,
            "traceName": timeline.title,
            "traceEvents": events,
        },
        separators=(",", ":"),
    )


class _Pids:
    """Processes of several hosts may have the same number."""

    def __init__(self) -> None:
        self._hosts: dict[int, str] = {}

    def of(self, row: Row) -> int:
        """The process's own number, if no other host has it."""
        pid = row.pid
        while self._hosts.setdefault(pid, row.host) != row.host:
            pid += _NEXT_HOST
        return pid


def _panel(panel: Panel, zero_us: float, pids: _Pids) -> Iterable[dict[str, Any]]:
    for row in panel.rows:
        yield from _row(row, pids.of(row), zero_us)


def _row(row: Row, pid: int, zero_us: float) -> Iterable[dict[str, Any]]:
    ends: list[float] = []
    yield _name("process_name", row.label, pid, 0)
    for save in sorted(row.saves, key=lambda one: one.begin_s):
        thread = _FIRST_THREAD + _lane(ends, save.begin_s, save.end_s)
        yield _name("thread_name", "ioshape saves", pid, thread)
        yield from _save(save, pid, thread, zero_us)


def _lane(ends: list[float], begin: float, end: float) -> int:
    """The first thread that has nothing more to do by then."""
    for number, busy_until in enumerate(ends):
        if busy_until <= begin:
            ends[number] = end
            return number
    ends.append(end)
    return len(ends) - 1


def _save(save: Save, pid: int, thread: int, zero_us: float) -> Iterable[dict[str, Any]]:
    length = save.end_s - save.begin_s
    yield _slice(save.name, "ioshape", pid, thread, zero_us, save.begin_s, length, save.details)
    for span in save.spans:
        about = {"what": PHASES[span.phase]}
        yield _slice(
            span.phase,
            "ioshape",
            pid,
            thread,
            zero_us,
            span.begin_s,
            span.end_s - span.begin_s,
            about,
        )


def _slice(
    name: str,
    category: str,
    pid: int,
    thread: int,
    zero_us: float,
    begin_s: float,
    seconds: float,
    details: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": thread,
        "ts": round(zero_us + begin_s * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": details,
    }


def _name(kind: str, name: str, pid: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": thread, "args": {"name": name}}
