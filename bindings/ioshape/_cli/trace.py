# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape trace": reads the reports of a run, and summarises or converts them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ioshape._cli.output import (
    SentenceError,
    Table,
    columns,
    human_size,
    json_option,
    plural,
    remark,
    say,
    say_json,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


_MOST_ROWS = 50


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


_FIGURES = (">saves", ">bytes", ">all done s", ">mean s", ">p99 s", ">stall s")
_WAITS = (">wait s", ">longest s", ">failed", ">skipped")


def _cells(storm: Storm) -> list[str]:
    seconds = (storm.makespan_s, storm.mean_s, storm.p99_s, storm.training_held_s)
    waits = (storm.mean_wait_s, storm.longest_wait_s)
    return [
        f"{storm.saves:,}",
        human_size(storm.bytes),
        *(f"{value:.3f}" for value in (*seconds, *waits)),
        f"{storm.failed:,}",
        f"{storm.skipped:,}",
    ]


def _show(found: list[Storm]) -> None:
    table = Table(*columns(">storm", "<began", ">ranks", *_FIGURES, *_WAITS))
    first = max(0, len(found) - _MOST_ROWS)
    for number, storm in enumerate(found[first:], start=first + 1):
        table.add(str(number), _time(storm.began_s), f"{storm.ranks:,}", *_cells(storm))
    if first:
        say(f"The last {_MOST_ROWS} of {plural(len(found), 'storm')}; --json has all.")
    table.show()


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
    found = storms(run.saves)
    if as_json:
        told = [asdict(storm) for storm in found]
        say_json({"saves": len(run.saves), "problems": run.problems, "storms": told})
    else:
        _show(found)
    if chrome_path is not None:
        Path(chrome_path).write_text(chrome(run.saves), encoding="utf-8")
    click.get_current_context().exit(int(bool(run.problems)))


# ---- The reports of a run ------------------------------------------------------------------------
#
# Reads the reports of a run, which the setting "trace" and C programs write as JSON lines.
#
# The files are untrusted: values are converted, and lines that are no reports are counted.

_MOST_LINE_BYTES = 64 << 10
_MOST_LINES = 2_000_000  # of all files
_MOST_SECONDS = 1e11
#: gap between saves that ends a storm
_APART_S = 1.0

#: time members of a report in the order in which they happen, each with the name of its phase
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

_DETAILS = (
    "path",
    "file_bytes",
    "engine",
    "mode",
    "coordinator",
    "ahead",
    "filesystem",
    "stripes",
    "error",
    "skipped",
)


@dataclass(frozen=True)
class Recorded:
    """One save of a run. Times are in seconds, points in time are since 1970."""

    host: str
    rank: int
    pid: int
    started_s: float
    total_s: float
    parts: dict[str, float]
    path: str
    file_bytes: int
    background: bool
    error: str | None
    details: dict[str, Any]

    @property
    def ended_s(self) -> float:
        return self.started_s + self.total_s

    @property
    def held_s(self) -> float:
        """The seconds for which the caller waited."""
        if not self.background:
            return self.total_s
        return self.parts["pickle_s"] + self.parts["stage_s"]


def parse(line: bytes) -> Recorded | None:
    """Return the report in a line; None if it is not a valid report of a save."""
    if len(line) > _MOST_LINE_BYTES:
        return None
    try:
        found = json.loads(line)
        if found["ioshape"] != "save":
            return None
        return Recorded(
            host=str(found["host"]),
            rank=int(found["rank"]),
            pid=int(found["pid"]),
            started_s=_seconds(found["started_s"]),
            total_s=_seconds(found["total_s"]),
            parts={name: _seconds(found.get(name)) for name, _ in PARTS},
            path=str(found.get("path") or ""),
            file_bytes=int(found.get("file_bytes") or 0),
            background=found.get("background") is True,
            error=str(found.get("error") or "") or None,
            details={
                name: found[name]
                for name in _DETAILS
                if isinstance(found.get(name), (str, int, float))
                and found[name] != ""
                and found[name] is not False
            },
        )
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None


def _seconds(value: Any) -> float:
    seconds = float(value or 0)
    if not 0 <= seconds <= _MOST_SECONDS:  # excludes NaN, too
        raise ValueError
    return seconds


@dataclass
class Run:
    """All saves of a run, in the order in which they began, and problems with its files."""

    saves: list[Recorded] = field(default_factory=list)
    #: messages, each about a file
    problems: list[str] = field(default_factory=list)


def read(folder: Path) -> Run:
    """Read all files *.jsonl of a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    run = Run()
    lines = 0
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".jsonl"):
        if not path.is_file():
            continue
        bad = 0
        try:
            for line in islice(_lines(path), _MOST_LINES - lines):
                lines += 1
                save = parse(line)
                if save is None:
                    bad += 1
                else:
                    run.saves.append(save)
        except OSError as error:
            run.problems.append(f"{path}: {error.strerror}")
        if bad:
            run.problems.append(f"{path}: {plural(bad, 'line')} without a report of a save")
        if lines == _MOST_LINES:
            run.problems.append(f"only the first {_MOST_LINES:,} lines are read")
            break
    run.saves.sort(key=lambda save: save.started_s)
    return run


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file. A line that is too long is cut."""
    with path.open("rb") as file:
        while line := file.readline(_MOST_LINE_BYTES + 1):
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
                pass
            yield line


def read_run(folder: str) -> Run:
    """Read the reports in a folder. Print problems with them on stderr.

    Raises:
        SentenceError: the folder cannot be read or has no reports.
    """
    try:
        run = read(Path(folder))
    except OSError as error:
        raise SentenceError(
            f"cannot read the reports in {folder}: {error.strerror}; name the folder that "
            "IOSHAPE_TRACE had"
        ) from None
    for problem in run.problems:
        remark(f"ioshape: {problem}")
    if not run.saves:
        raise SentenceError(
            f"{folder} has no reports of saves; run the program with IOSHAPE_TRACE={folder} to "
            "write them"
        )
    return run


# ---- Storms ------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed, uninterpolated."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def by_process(saves: Iterable[Recorded]) -> dict[tuple[str, int, int], list[Recorded]]:
    """Return the saves of each process, by host, rank and pid."""
    found: dict[tuple[str, int, int], list[Recorded]] = {}
    for save in saves:
        found.setdefault((save.host, save.rank, save.pid), []).append(save)
    return found


@dataclass(frozen=True)
class Storm:
    """Saves that overlap or follow each other closely, with the member names of the JSON output."""

    saves: int
    ranks: int
    bytes: int
    began_s: float
    #: from the begin of the first save to the end of the last one
    makespan_s: float
    mean_s: float
    p99_s: float
    #: time for which the caller of a save waited, on average
    training_held_s: float
    #: waits for slots
    mean_wait_s: float
    longest_wait_s: float
    failed: int
    skipped: int

    @classmethod
    def of(cls, saves: Sequence[Recorded]) -> Storm:
        """Summarise these saves, which must be in the order in which they began."""
        took = [save.total_s for save in saves]
        waits = [save.parts["slot_s"] for save in saves]
        began_s = saves[0].started_s
        return cls(
            saves=len(saves),
            ranks=len(by_process(saves)),
            bytes=sum(save.file_bytes for save in saves),
            began_s=began_s,
            makespan_s=max(save.ended_s for save in saves) - began_s,
            mean_s=fmean(took),
            p99_s=percentile(took, 99),
            training_held_s=fmean(save.held_s for save in saves),
            mean_wait_s=fmean(waits),
            longest_wait_s=max(waits),
            failed=sum(save.error is not None for save in saves),
            skipped=sum(save.details.get("skipped") is True for save in saves),
        )


def storms(saves: Iterable[Recorded]) -> list[Storm]:
    """Return the storms of a run, in the order in which they began.

    `saves` must be in the order in which they began. A storm ends if no save runs for a second.
    """
    found: list[list[Recorded]] = []
    until = -math.inf
    for save in saves:
        if save.started_s > until + _APART_S:
            found.append([])
        found[-1].append(save)
        until = max(until, save.ended_s)
    return [Storm.of(one) for one in found]
