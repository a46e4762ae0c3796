# SPDX-License-Identifier: Apache-2.0
"""A storm: many ranks save together, in several ways in turns, while neighbours do their work."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ioshape.cli import _metadata, _neighbours, _storm_rank
from ioshape.cli._children import Child, Children, now_ns
from ioshape.cli._neighbours import Habits, Operation
from ioshape.cli._storm_figures import RankSave, Round, Summary
from ioshape.cli._ways import GROUPS, USUAL, WAYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: until all ranks have heard when to begin
_AHEAD_NS = 60_000_000
#: what a disk does after files were removed
_SETTLE_S = 0.3
#: for answers that are no save
_READY_S = 300.0
_LONGEST_S = 3600.0
_CHECKED_AT_A_TIME = 4


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    ranks: int
    n_bytes: int
    ways: tuple[str, ...] = USUAL
    rounds: int = 3
    nodes: int = 1
    #: a round before that does not count: it makes buffers and connections
    warm_up: bool = True
    #: another one, without neighbours, in which metadata operations are counted where that is told
    count_metadata: bool = True
    #: whether stock torch finds what was saved, after the last round
    check: bool = True
    alone_s: float = 2.0
    habits: Habits = field(default_factory=Habits)


@dataclass
class Storm:
    """What was measured."""

    plan: Plan
    #: of neighbours when nobody saves
    alone: list[Operation] = field(default_factory=list)
    summaries: dict[str, Summary] = field(default_factory=dict)
    #: seconds since 1970 less seconds of now_ns()
    epoch_s: float = 0.0


def run(plan: Plan, folder: Path, say: Callable[[str], None] = lambda _text: None) -> Storm:
    """Measures, in a folder that is the caller's to remove. The caller has not used threads so far.

    Raises:
        ChildError: a rank or a neighbour failed; none is left.
    """
    with Measurement(plan, folder) as measurement:
        measurement.tell = say
        measurement.all()
        return measurement.storm


class Measurement:
    """Processes that stand ready, and what is done with them.

    Whoever enters it has started no thread; from then on threads do no harm.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.storm = Storm(plan, summaries={way: Summary() for way in plan.ways})
        self.tell: Callable[[str], None] = lambda _text: None
        self._children = Children()
        self._ranks: list[Child] = []
        self._neighbours: list[Child] = []
        self._step = 0
        self._meeting = ""

    # ---- Beginning and end ----------------------------------------------------------------------

    def __enter__(self) -> Measurement:
        self._children.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_what: object) -> None:
        self._children.close()
        if self._meeting:
            shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self) -> None:
        plan = self.plan
        if plan.nodes > 1 and any(GROUPS.get(way) == "rank0" for way in plan.ways):
            # Their bytes go from node to node.
            self._meeting = tempfile.mkdtemp(prefix="ioshape-storm-")
        token = f"storm-{uuid.uuid4().hex[:16]}"
        for rank in range(plan.ranks):
            place = _storm_rank.Place(
                rank,
                plan.ranks,
                plan.nodes,
                token,
                plan.n_bytes,
                str(Path(self._meeting) / "meeting") if self._meeting else "",
            )
            self._ranks.append(self._children.start(f"rank {rank}", _storm_rank.rank(place)))
        small = self.folder / "neighbours"
        small.mkdir()
        _neighbours.prepare(small, plan.habits)
        for kind, count in (
            (_neighbours.reader, plan.habits.readers),
            (_neighbours.writer, plan.habits.writers),
        ):
            for number in range(count):
                work = kind(small, plan.habits, number)
                name = f"neighbour {len(self._neighbours)}"
                self._neighbours.append(self._children.start(name, work))
        for way in plan.ways:
            (self.folder / way).mkdir()
        self._children.hear(self._neighbours, _READY_S)
        self._children.ask(self._ranks, _READY_S, do="get_ready")
        self.storm.epoch_s = time.time() - now_ns() / 1e9

    # ---- Measuring ------------------------------------------------------------------------------

    def all(self) -> None:
        """Fills the storm."""
        plan = self.plan
        self.tell("neighbours alone")
        self._settle()
        self._begin_neighbours()
        self._children.rest(plan.alone_s)
        self.storm.alone = self._end_neighbours()
        if plan.warm_up:
            for way in plan.ways:
                self.tell(f"warming up: {WAYS[way]}")
                self._once(way, 0, neighbours=False)
        if plan.count_metadata and _metadata.counts(self.folder) is not None:
            # Neighbours have such operations, too.
            for way in plan.ways:
                self.tell(f"counting metadata operations: {WAYS[way]}")
                self._once(way, 0, neighbours=False, count=True)
        for number in range(plan.rounds):
            # Who begins changes.
            first = number % len(plan.ways)
            for way in plan.ways[first:] + plan.ways[:first]:
                self.tell(f"round {number + 1} of {plan.rounds}: {WAYS[way]}")
                last = plan.check and number == plan.rounds - 1
                found = self._once(way, number + 1, neighbours=True, check=last)
                self.storm.summaries[way].rounds.append(found)

    def _once(
        self,
        way: str,
        number: int,
        *,
        neighbours: bool,
        check: bool = False,
        count: bool = False,
    ) -> Round:
        self._step += 1
        target = str(self.folder / way)
        self._settle()
        counter = _metadata.Counter(self.folder) if count else None
        if neighbours:
            self._begin_neighbours()
        at_ns = now_ns() + _AHEAD_NS + self.plan.ranks * 1_000_000
        answers = self._children.ask(
            self._ranks, _LONGEST_S, do="save", way=way, folder=target, step=self._step, at_ns=at_ns
        )
        if counter is not None:
            self.storm.summaries[way].metadata = counter.since()
        operations = self._end_neighbours() if neighbours else []
        found = _round_of(way, number, at_ns, answers, operations, self._ranks)
        if check:
            self.tell(f"looking at what was saved: {WAYS[way]}")
            for first in range(0, len(self._ranks), _CHECKED_AT_A_TIME):
                some = self._ranks[first : first + _CHECKED_AT_A_TIME]
                answers = self._children.ask(
                    some, _LONGEST_S, do="check", way=way, folder=target, step=self._step
                )
                self.storm.summaries[way].checked_bytes += sum(one["bytes"] for one in answers)
        self._remove(way)
        return found

    def _begin_neighbours(self) -> None:
        for child in self._neighbours:
            child.tell(do="live")

    def _end_neighbours(self) -> list[Operation]:
        answers = self._children.ask(self._neighbours, _READY_S, do="stop")
        return [
            Operation(answer["kind"], begin, took)
            for answer in answers
            for begin, took in answer["operations"]
        ]

    # ---- In between -----------------------------------------------------------------------------

    def _remove(self, way: str) -> None:
        """Its files; what a group keeps beside its generations stays, as it is still open."""
        for path in (self.folder / way).iterdir():
            if path.name.startswith("step-") and path.is_dir():
                shutil.rmtree(path)
            elif path.name.startswith("step-"):
                path.unlink()

    def _settle(self) -> None:
        """The storage has nothing left to do from before."""
        _neighbours.sync_filesystem(self.folder)
        self._children.rest(_SETTLE_S)


def _round_of(
    way: str,
    number: int,
    at_ns: int,
    answers: Sequence[dict[str, Any]],
    operations: Sequence[Operation],
    children: Sequence[Child],
) -> Round:
    def seconds(moment_ns: int) -> float:
        return (moment_ns - at_ns) / 1e9

    ranks = [
        RankSave(
            seconds(answer["begin_ns"]),
            seconds(answer["returned_ns"]),
            seconds(answer["end_ns"]),
            answer["report"],
            [(phase, seconds(a), seconds(b)) for phase, a, b in answer.get("spans", ())],
            child.pid,
        )
        for answer, child in zip(answers, children, strict=True)
    ]
    end_ns = at_ns + round(max(rank.end_s for rank in ranks) * 1e9)
    return Round(
        way,
        number,
        at_ns,
        ranks,
        # Before, nobody saved, and afterwards nobody did.
        [one for one in operations if at_ns <= one.at_ns < end_ns],
    )
