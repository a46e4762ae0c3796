# SPDX-License-Identifier: Apache-2.0
"""Judges logs of tests/c/support/chaos_client.c: did a client hold a slot that it should not have?

A holder counts as such from the return of acquire until it calls release, learns that the slot was
lost, or dies (just before its kill). Saves in the small-file bypass, and those that write at a
staggered time without the coordinator ("stagger"), hold no slot.

At no time may holders have more slots than there are, except in these windows, in which a holder
does not count:

* LATE: the last sixth of a lease before it learns that its slot was lost. By its own clock the
  lease ends after nine tenths. It notices when its thread runs next, which the system decides.

* STOPPED: a stopped process (SIGSTOP) notices nothing. Its last heartbeat was at most a third of a
  lease, and a look, before the stop. So its slot cannot go to another client before 0.6 of a lease
  after that. The window lasts until a sixth of a lease after it goes on.
  If it is stopped again before that, it had no time to notice: both count as one stop.

* DATA LOST (docs/slots.md, "When more than capacity can write", 3): the coordinator lost its data.
  It was killed without a file or with one that is up to a second old, emptied, or replaced by a
  replica. A former holder that comes back within half a lease gets its slot again. Slots granted
  before that may exceed the capacity until they are released. Such times are counted separately
  (`over_after_loss`). A test can allow none if leases are long compared to the pauses between
  attempts to connect (1 s at most). Even then there are at most twice as many as the capacity.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MS = 1_000_000

LATE = 1 / 6
STOPPED_FROM = 0.6


@dataclass
class Harm:
    """The harm done to clients and coordinator. Times are CLOCK_MONOTONIC in ns."""

    #: by client: time just before its kill
    deaths: dict[str, int] = field(default_factory=dict)
    #: client, time of the stop, time of the continuation
    stops: list[tuple[str, int, int]] = field(default_factory=list)
    #: beginning and end of what made the coordinator lose data
    losses: list[tuple[int, int]] = field(default_factory=list)
    #: number of harms, by kind
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class Holding:
    """A slot as its holder sees it."""

    client: str
    turn: str
    begin: int
    end: int
    ended_by: str
    fence: int
    by: str
    express: bool
    weight: int
    asked: int

    def __str__(self) -> str:
        return (
            f"{self.client}/{self.turn} {self.begin / 1e9:.4f}-{self.end / 1e9:.4f} "
            f"({self.ended_by}) fence {self.fence} weight {self.weight}"
        )

    @property
    def counts(self) -> bool:
        """True if it counts against the capacity."""
        return self.by in {"redis", "local"} and not self.express


@dataclass
class Verdict:
    """The findings about a scene. All lists of faults must be empty."""

    over: list[str] = field(default_factory=list)
    over_after_loss: list[str] = field(default_factory=list)
    dup_fences: list[str] = field(default_factory=list)
    fences_back: list[str] = field(default_factory=list)
    failed_turns: list[str] = field(default_factory=list)
    failed_saves: list[str] = field(default_factory=list)
    used_at_rest: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    #: longest durations in ms, by name
    longest: dict[str, float] = field(default_factory=dict)
    #: from the death of a holder to the next grant: relative to the bound, or in ms
    reclaims: list[float] = field(default_factory=list)

    #: lists that are faults in every scene
    FAULTS = (
        "over",
        "dup_fences",
        "fences_back",
        "failed_turns",
        "failed_saves",
        "used_at_rest",
        "hung",
    )

    def faults(self) -> list[str]:
        """Return all faults as texts."""
        return [f"{name}: {text}" for name in self.FAULTS for text in getattr(self, name)]

    def add(self, other: "Verdict") -> None:
        """Add the findings of another verdict."""
        for name in (*self.FAULTS, "over_after_loss", "reclaims"):
            getattr(self, name).extend(getattr(other, name))
        self.counts.update(other.counts)
        for name, value in other.longest.items():
            self.saw(name, value)

    def saw(self, name: str, ms: float) -> None:
        """Record a duration if it is the longest of its name."""
        self.longest[name] = max(ms, self.longest.get(name, 0.0))


@dataclass
class Line:
    """A line of a log."""

    at: int
    client: str
    event: str
    values: dict[str, str]
    text: str


def read_log(log: Path) -> Iterator[Line]:
    """Yield all lines of a log."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        head, _, text = line.partition("; ")
        at, client, event, *rest = head.rstrip(";").split()
        yield Line(int(at), client, event, dict(part.split("=", 1) for part in rest), text)


class Story:
    """The events of a log, as holdings and failures."""

    def __init__(self, log: Path, harm: Harm) -> None:
        self.harm = harm
        self.holdings: list[Holding] = []
        self.failed: list[str] = []
        self.failed_saves: list[str] = []
        self.counts: Counter[str] = Counter()
        self._open: dict[tuple[str, str], Holding] = {}
        self._asked: dict[tuple[str, str], int] = {}
        self._lost: dict[tuple[str, str], int] = {}
        self.last = 0
        for line in read_log(log):
            self._read(line)
        for holding in self._open.values():
            holding.end = harm.deaths.get(holding.client, self.last)
            holding.ended_by = "death" if holding.client in harm.deaths else "nothing"

    def _read(self, line: Line) -> None:
        self.last = max(self.last, line.at)
        key = (line.client, line.values.get("turn", ""))
        if line.event == "ask":
            self._asked[key] = line.at
        elif line.event in {"got", "saved"}:
            self._begin(key, line)
        elif line.event == "lost":
            self.counts["lost"] += 1
            self._lost[key] = line.at
            self._end(key, line.at, "lost")
        elif line.event == "release":
            self._end(key, line.at, "release")
        elif line.event == "fail":
            told = f"{line.client}: {line.values.get('code')} {line.text}"
            (self.failed_saves if "-save" in line.client else self.failed).append(told)

    def _begin(self, key: tuple[str, str], line: Line) -> None:
        values = line.values
        saved = line.event == "saved"
        holding = Holding(
            *key,
            begin=int(values["begin"]) if saved else line.at,
            end=int(values["end"]) if saved else 0,
            ended_by="release" if saved else "",
            fence=int(values["fence"]),
            by=values["by"],
            express=values["express"] == "1",
            weight=int(values.get("weight", "1")),
            asked=self._asked.get(key, 0),
        )
        self.counts[line.event] += 1
        self.counts["express"] += holding.express
        self.counts[holding.by] += 1
        if saved and values["lost"] == "1":
            self.counts["saves_without_slot"] += 1
            holding.end = holding.begin  # the time of the loss is unknown
        self.holdings.append(holding)
        if not saved:
            self._open[key] = holding
            if key in self._lost:
                self._end(key, line.at, "lost")

    def _end(self, key: tuple[str, str], at: int, why: str) -> None:
        holding = self._open.pop(key, None)
        if holding:
            holding.end, holding.ended_by = at, why


# ---- Judging -------------------------------------------------------------------------------------


def _without(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first, last in pieces:
        if begin >= end or begin >= last or end <= first:
            yield first, last
            continue
        if first < begin:
            yield first, begin
        if end < last:
            yield end, last


def _stops(holding: Holding, harm: Harm, late: int) -> list[tuple[int, int]]:
    """Return the times during which the holder was stopped, and until it had time to be told."""
    joined: list[tuple[int, int]] = []
    for stopped, went_on in sorted(one[1:] for one in harm.stops if one[0] == holding.client):
        # A stop that was over before the holder had this slot does not count.
        if joined and stopped <= joined[-1][1] and holding.begin < joined[-1][1] - late:
            stopped = joined.pop()[0]  # noqa: PLW2901
        joined.append((stopped, went_on + late))
    return joined


def _counted(holding: Holding, harm: Harm, lease_ms: int) -> list[tuple[int, int]]:
    """Return the times during which a holding counts: all but the windows LATE and STOPPED."""
    lease = lease_ms * MS
    pieces = [(holding.begin, holding.end)]
    if holding.ended_by == "lost":
        pieces = list(_without(pieces, int(holding.end - LATE * lease), holding.end))
    for stopped, late in _stops(holding, harm, int(LATE * lease)):
        pieces = list(_without(pieces, int(stopped + STOPPED_FROM * lease), late))
    return pieces


def _too_many(
    holdings: Sequence[Holding], pieces: Sequence[list[tuple[int, int]]], capacity: int
) -> Iterator[tuple[int, int, list[Holding]]]:
    """Yield the times at which more slots were held than there are, with the holders."""
    changes = sorted(
        (at, begins, index)
        for index, times in enumerate(pieces)
        for begin, end in times
        if begin < end
        for at, begins in ((begin, True), (end, False))
    )
    present: set[int] = set()
    since = 0
    for at, begins, index in changes:
        used = sum(holdings[one].weight for one in present)
        if used > capacity and len(present) > 1 and at > since:
            yield since, at, [holdings[one] for one in sorted(present)]
        (present.add if begins else present.remove)(index)
        since = at


def _judge_capacity(verdict: Verdict, story: Story, capacity: int, lease_ms: int) -> None:
    harm = story.harm
    holdings = [one for one in story.holdings if one.counts]
    pieces = [_counted(one, harm, lease_ms) for one in holdings]
    # Twice: with all holders, and without those from before a loss of data.
    survivors = []
    for one, times in zip(holdings, pieces, strict=True):
        for begin, end in harm.losses:
            if one.begin < end:
                times = list(_without(times, begin, one.end))  # noqa: PLW2901
        survivors.append(times)
    for name, what, most in (
        ("over", survivors, capacity),
        ("over", pieces, 2 * capacity),
        ("over_after_loss", pieces, capacity),
    ):
        for begin, end, who in _too_many(holdings, what, most):
            if name == "over_after_loss" and not harm.losses:
                continue  # already reported
            told = f"{(end - begin) / MS:.3f} ms at {begin / 1e9:.4f}: " + "; ".join(map(str, who))
            getattr(verdict, name).append(told)
            verdict.saw(name, (end - begin) / MS)


def _judge_fences(verdict: Verdict, story: Story) -> None:
    seen: dict[int, Holding] = {}
    for one in story.holdings:
        if not one.fence:
            continue
        if one.fence in seen:
            verdict.dup_fences.append(f"{one} and {seen[one.fence]}")
        seen[one.fence] = one
    # A client that asks after another one was served gets a higher fence.
    begun = sorted((one for one in story.holdings if one.fence), key=lambda one: one.begin)
    asked = sorted((one for one in begun if one.asked), key=lambda one: one.asked)
    highest: Holding | None = None
    at = 0
    for one in asked:
        while at < len(begun) and begun[at].begin < one.asked:
            if highest is None or begun[at].fence > highest.fence:
                highest = begun[at]
            at += 1
        if highest and highest.fence >= one.fence:
            verdict.fences_back.append(f"{one} asked after {highest} was there")


def judge(log: Path, harm: Harm, capacity: int, lease_ms: int) -> Verdict:
    """Return all findings from a log."""
    verdict = Verdict()
    story = Story(log, harm)
    verdict.failed_turns = story.failed
    verdict.failed_saves = story.failed_saves
    verdict.counts.update(story.counts)
    verdict.counts.update(harm.counts)
    _judge_capacity(verdict, story, capacity, lease_ms)
    _judge_fences(verdict, story)
    for one in story.holdings:
        if one.ended_by == "nothing":
            verdict.hung.append(f"{one} was never given back")
    return verdict
