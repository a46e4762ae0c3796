# SPDX-License-Identifier: Apache-2.0
"""A timeline as a trace of Chrome's kind, which Perfetto opens, on the clock of torch's profiler.

torch's profiler writes microseconds since "baseTimeNanoseconds", which is the last multiple of a
quarter of a year since 1970. With the same base, slices of both lie right in one view.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ioshape._cli.trace.timeline import PHASES, Row, Save, Timeline

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
    hosts: dict[int, str] = {}
    slices: list[dict[str, Any]] = []
    names: dict[tuple[int, int], str] = {}
    for panel in timeline.panels:
        for row in panel.rows:
            pid = _pid_of(row, hosts)
            names[pid, 0] = row.label
            for thread, save in _threads(row.saves):
                names[pid, thread] = "ioshape saves"
                slices += _slices(save, pid, thread, (panel.epoch_s - base_s) * 1e6)
    return json.dumps(
        {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_s * 10**9,
            "traceName": timeline.title,
            "traceEvents": [
                {
                    "ph": "M",
                    "name": "thread_name" if thread else "process_name",
                    "pid": pid,
                    "tid": thread,
                    "args": {"name": name},
                }
                for (pid, thread), name in names.items()
            ]
            + slices,
        },
        separators=(",", ":"),
    )


def _pid_of(row: Row, hosts: dict[int, str]) -> int:
    """The process's own number, if no other host has it."""
    pid = row.pid
    while hosts.setdefault(pid, row.host) != row.host:
        pid += _NEXT_HOST
    return pid


def _threads(saves: list[Save]) -> Iterable[tuple[int, Save]]:
    """Each save on the first thread that has nothing more to do by then."""
    ends: list[float] = []
    for save in sorted(saves, key=lambda one: one.begin_s):
        lane = next((i for i, end in enumerate(ends) if end <= save.begin_s), len(ends))
        ends[lane:] = [save.end_s, *ends[lane + 1 :]]
        yield _FIRST_THREAD + lane, save


def _slices(save: Save, pid: int, thread: int, zero_us: float) -> Iterable[dict[str, Any]]:
    """Return the save, and its parts below it."""
    parts = [
        (span.phase, span.begin_s, span.end_s, {"what": PHASES[span.phase]}) for span in save.spans
    ]
    for name, begin_s, end_s, about in [
        (save.name, save.begin_s, save.end_s, save.details),
        *parts,
    ]:
        yield {
            "ph": "X",
            "cat": "ioshape",
            "name": name,
            "pid": pid,
            "tid": thread,
            "ts": round(zero_us + begin_s * 1e6, 3),
            "dur": round((end_s - begin_s) * 1e6, 3),
            "args": about,
        }
