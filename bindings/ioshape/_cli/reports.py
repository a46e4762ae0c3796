# SPDX-License-Identifier: Apache-2.0
"""Reads the reports of a run, which the setting "trace" and C programs write as JSON lines.

The files are untrusted: values are converted, and lines that are no reports are counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from ioshape._cli.output import SentenceError, plural, remark

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


@dataclass
class Gust:
    """A storm: saves that overlap or follow each other closely."""

    saves: list[Recorded]

    @property
    def began_s(self) -> float:
        return min(save.started_s for save in self.saves)

    @property
    def makespan_s(self) -> float:
        return max(save.ended_s for save in self.saves) - self.began_s

    @property
    def mean_s(self) -> float:
        """The mean duration of a save."""
        return fmean(save.total_s for save in self.saves)

    @property
    def p99_s(self) -> float:
        return percentile([save.total_s for save in self.saves], 99)

    @property
    def held_s(self) -> float:
        return fmean(save.held_s for save in self.saves)

    @property
    def waited_s(self) -> float:
        return fmean(save.parts["slot_s"] for save in self.saves)

    @property
    def most_waited_s(self) -> float:
        return max(save.parts["slot_s"] for save in self.saves)

    @property
    def n_bytes(self) -> int:
        return sum(save.file_bytes for save in self.saves)

    @property
    def failed(self) -> int:
        return sum(save.error is not None for save in self.saves)

    @property
    def skipped(self) -> int:
        return sum(save.details.get("skipped") is True for save in self.saves)

    @property
    def ranks(self) -> int:
        return len(by_process(self.saves))


def gusts(saves: Iterable[Recorded]) -> list[Gust]:
    """Return the storms of a run, in the order in which they began.

    `saves` must be in the order in which they began. A storm ends if no save runs for a second.
    """
    found: list[Gust] = []
    until = -math.inf
    for save in saves:
        if save.started_s > until + _APART_S:
            found.append(Gust([]))
        found[-1].saves.append(save)
        until = max(until, save.ended_s)
    return found
