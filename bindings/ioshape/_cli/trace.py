# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape trace": summarises the reports of a run, and converts them for Perfetto."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ioshape._cli.output import (
    Table,
    columns,
    human_size,
    json_option,
    plural,
    say,
    say_json,
)
from ioshape._cli.reports import PARTS, by_process, gusts, read_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ioshape._cli.reports import Gust, Recorded, Run

_MOST_ROWS = 50


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


_FIGURES = (">saves", ">bytes", ">all done s", ">mean s", ">p99 s", ">stall s")
_WAITS = (">wait s", ">longest s", ">failed", ">skipped")


def _cells(gust: Gust) -> list[str]:
    seconds = (gust.makespan_s, gust.mean_s, gust.p99_s, gust.held_s)
    return [
        f"{len(gust.saves):,}",
        human_size(gust.n_bytes),
        *(f"{value:.3f}" for value in (*seconds, gust.waited_s, gust.most_waited_s)),
        f"{gust.failed:,}",
        f"{gust.skipped:,}",
    ]


def _show(found: list[Gust]) -> None:
    table = Table(*columns(">storm", "<began", ">ranks", *_FIGURES, *_WAITS))
    first = max(0, len(found) - _MOST_ROWS)
    for number, gust in enumerate(found[first:], start=first + 1):
        table.add(str(number), _time(gust.began_s), f"{gust.ranks:,}", *_cells(gust))
    if first:
        say(f"The last {_MOST_ROWS} of {plural(len(found), 'storm')}; --json has all.")
    table.show()


def _gust_json(gust: Gust) -> dict[str, Any]:
    return {
        "saves": len(gust.saves),
        "ranks": gust.ranks,
        "bytes": gust.n_bytes,
        "began_s": gust.began_s,
        "makespan_s": gust.makespan_s,
        "mean_s": gust.mean_s,
        "p99_s": gust.p99_s,
        "training_held_s": gust.held_s,
        "mean_wait_s": gust.waited_s,
        "longest_wait_s": gust.most_waited_s,
        "failed": gust.failed,
        "skipped": gust.skipped,
    }


def _as_json(run: Run, found: list[Gust]) -> dict[str, Any]:
    return {
        "saves": len(run.saves),
        "problems": run.problems,
        "storms": [_gust_json(gust) for gust in found],
    }


# ---- The trace for Perfetto ---------------------------------------------------------------------
#
# torch's profiler writes microseconds since "baseTimeNanoseconds", which is the last multiple of a
# quarter of a year since 1970. This trace uses the same base, so that Perfetto can show both in one
# view.

_QUARTER_S = 7_889_238
#: first thread id of saves; the profiler's threads of the process have lower ids
_FIRST_THREAD = 1_000_000_001
#: offset between pids of different hosts; larger than any pid
_NEXT_HOST = 10_000_000
_LEAST_REST = 0.01  # share of a save from which the time of no phase is shown

#: description of each phase, for the trace
PHASES = {
    "stage": "copies",
    "wait": "waits for its slot",
    "plan": "creates the file",
    "write": "writes",
    "sync": "syncs",
    "commit": "renames it into place",
    "others": "waits for other ranks",
    "drain": "is drained",
    "rest": "everything else",
}


class Span(NamedTuple):
    """A phase of a save, with its begin and end."""

    phase: str
    begin_s: float
    end_s: float


def spans_of(report: Mapping[str, Any], begin_s: float, end_s: float) -> list[Span]:
    """Return the phases of a save in order, without those shorter than a thousandth of it."""
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
    # Time of no phase, such as starting a thread. It becomes a last phase, if it is long enough.
    if end_s - at > _LEAST_REST * (end_s - begin_s):
        spans.append(Span("rest", at, end_s))
    return spans


def chrome(saves: Sequence[Recorded]) -> str:
    """Return a trace of the saves in Chrome's JSON format.

    `saves` must be in the order in which they began, and not empty.
    """
    base_s = int(saves[0].started_s) // _QUARTER_S * _QUARTER_S
    several = len({save.host for save in saves}) > 1
    hosts: dict[int, str] = {}
    slices: list[dict[str, Any]] = []
    names: dict[tuple[int, int], str] = {}
    for (host, rank, number), own in by_process(saves).items():
        pid = number
        while hosts.setdefault(pid, host) != host:
            pid += _NEXT_HOST
        names[pid, 0] = f"rank {rank}, {host}" if several else f"rank {rank}"
        for thread, save in _threads(own):
            names[pid, thread] = "ioshape saves"
            slices += _slices(save, base_s, {"cat": "ioshape", "pid": pid, "tid": thread})
    events = [
        {
            "ph": "M",
            "name": "thread_name" if thread else "process_name",
            "pid": pid,
            "tid": thread,
            "args": {"name": name},
        }
        for (pid, thread), name in names.items()
    ]
    return json.dumps(
        {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_s * 10**9,
            "traceName": "ioshape trace",
            "traceEvents": events + slices,
        },
        separators=(",", ":"),
    )


def _threads(saves: list[Recorded]) -> Iterator[tuple[int, Recorded]]:
    """Yield each save with a thread id: the first whose earlier saves have ended."""
    ends: list[float] = []
    for save in saves:
        row = next((i for i, end in enumerate(ends) if end <= save.started_s), len(ends))
        ends[row:] = [save.ended_s, *ends[row + 1 :]]
        yield _FIRST_THREAD + row, save


def _slices(save: Recorded, base_s: int, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a save: the whole save, then its phases."""
    begin_s = save.started_s - base_s
    end_s = begin_s + save.total_s
    parts = [
        (span.phase, span.begin_s, span.end_s, {"what": PHASES[span.phase]})
        for span in spans_of(save.parts, begin_s, end_s)
    ]
    whole = (Path(save.path).name or "save", begin_s, end_s, save.details)
    for name, begin, end, about in (whole, *parts):
        times = {"ts": round(begin * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
        yield {"ph": "X", "name": name, **common, **times, "args": about}


@click.command(short_help="Summarise the saves of a run from their reports.")
@click.argument("folder", type=click.Path())
@click.option(
    "--chrome",
    "chrome_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write a trace for Perfetto to this file.",
)
@json_option
def command(
    folder: str,
    chrome_path: str | None,
    as_json: bool,
) -> None:
    """Summarise the saves of a run, from the reports that it left in FOLDER.

    A program writes reports if it runs with IOSHAPE_TRACE=FOLDER, or has called
    ioshape.configure(trace=FOLDER). Each process writes a line for each save.

    A storm begins with a save, and ends when no save has run for a second.

    Examples:

    \b
    IOSHAPE_TRACE=/scratch/reports torchrun train.py
    ioshape trace /scratch/reports
    ioshape trace /scratch/reports --chrome storm.json

    Exit code: 0; 1 if a file has lines that are no reports (counted on stderr).
    """
    run = read_run(folder)
    found = gusts(run.saves)
    if as_json:
        say_json(_as_json(run, found))
    else:
        _show(found)
    if chrome_path is not None:
        Path(chrome_path).write_text(chrome(run.saves), encoding="utf-8")
    click.get_current_context().exit(int(bool(run.problems)))
