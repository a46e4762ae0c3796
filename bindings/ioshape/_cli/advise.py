# SPDX-License-Identifier: Apache-2.0
"""ioshape advise: how often to save.

The interval between saves that loses least, after Young and Daly.

Failures come at random, each a mean time M after the last. A job trains for T, and begins a save,
which holds training for h. After d the save is durable, having waited for its slot; training goes
on meanwhile. A failure goes back to the latest save that is durable, and takes a restart R.

Of the time until a failure, the share that is kept is then

    E(T) = T exp(-(T + d + R) / M) / (M (1 - exp(-(T + h) / M)))

With h = d, a save that blocks, that is Daly's exact form. dE/dT = 0 where T = M (1 - exp(-(T + h)
/ M)), whatever d and R are; for a small h that is Young's sqrt(2 h M). d is a limit instead: a save
has to be durable before the next one begins.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    SentenceError,
    Table,
    UsageSentenceError,
    columns,
    human_seconds,
    json_option,
    plural,
    say,
    say_json,
)
from ioshape._cli.reports import checkpoints, read_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ioshape._cli.reports import Gust, Recorded

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_MOST_S = 1e9


@dataclass(frozen=True)
class Costs:
    """In seconds."""

    #: between failures of the job
    mtbf: float
    #: a save holds training for so long
    stall: float
    #: from its begin a save takes so long until it is durable, waiting included
    save: float
    restart: float = 0.0

    @property
    def shortest(self) -> float:
        """Of training between two saves: one is durable when the next one begins."""
        return max(self.save - self.stall, 0.0)

    def kept(self, interval: float) -> float:
        """E(T)."""
        left = math.exp(-(interval + self.save + self.restart) / self.mtbf)
        cycle = -math.expm1(-(interval + self.stall) / self.mtbf)
        if interval <= 0:  # the limit; where saves cost anything, nothing else is done
            return 0.0 if self.stall > 0 else left
        return min(interval * left / (self.mtbf * cycle), 1.0) if cycle > 0 else 1.0

    def lost(self, interval: float) -> float:
        """The share of the time that does not go into training that is kept."""
        return 1 - self.kept(interval)

    def held(self, interval: float) -> float:
        """The part of it that saves take whose training was kept."""
        return self.kept(interval) * self.stall / interval if interval > 0 else 0.0

    @property
    def unbounded(self) -> float:
        """The best interval, if saves were durable at once."""
        ratio = self.stall / self.mtbf
        if ratio <= 0:
            return 0.0
        low, high = 0.0, 1.0  # of x = T/M, at which x = 1 - exp(-(x + ratio))
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if -math.expm1(-(middle + ratio)) > middle else (low, middle)
        return high * self.mtbf

    @property
    def best(self) -> float:
        """Loses least."""
        return max(self.unbounded, self.shortest)

    @property
    def young(self) -> float:
        """What Young's rule says of a save that holds training until it is durable."""
        return math.sqrt(2 * self.save * self.mtbf)


# ---- What the reports of a run say ---------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """Seconds; None for what a run tells nothing about."""

    storms: int
    stall: float
    save: float
    wait: float
    interval: float | None
    mtbf: float | None
    restarts: int


def observe(saves: Sequence[Recorded]) -> Observed | None:
    """In the order in which they began; None if none of them succeeded."""
    # A checkpoint in which one rank failed holds nothing.
    found = checkpoints(saves)
    whole = [one for one in found if not one.failed and not one.skipped]
    if not whole:
        return None
    restarts = _restarts(saves)
    span = max(save.ended_s for save in saves) - saves[0].started_s
    return Observed(
        storms=len(whole),
        stall=fmean(one.stall_s for one in whole),
        save=fmean(one.makespan_s for one in whole),
        wait=fmean(one.most_waited_s for one in whole),
        interval=_interval(whole),
        mtbf=span / restarts if restarts else None,
        restarts=restarts,
    )


def _interval(found: Sequence[Gust]) -> float | None:
    """Of training, between the saves of one life: a longer gap may be a restart."""
    gaps = [after.began_s - before.began_s - before.stall_s for before, after in pairwise(found)]
    return max(median(gaps), 0.0) if gaps else None


def _restarts(saves: Sequence[Recorded]) -> int:
    """How often other processes took over, as the rank saw it that saw most."""
    lives: dict[int, set[tuple[str, int]]] = {}
    for save in saves:
        lives.setdefault(save.rank, set()).add((save.host, save.pid))
    return max(map(len, lives.values())) - 1


# ---- The command --------------------------------------------------------------------------------


def _time(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([smhd]?)", text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if not seconds <= _MOST_S:
        raise click.BadParameter(f"{text!r} is not a time, such as 90, 30m, 4h or 2d")
    return seconds


def _observe(folder: str) -> tuple[Observed, bool]:
    run = read_run(folder)
    found = observe(run.saves)
    if found is None:
        raise SentenceError(
            f"no checkpoint in {folder} was saved by all of its ranks; give --save-seconds"
        )
    return found, bool(run.problems)


def _mtbf(given: float | None, nodes: int, observed: Observed | None) -> float:
    found = given / nodes if given is not None else observed.mtbf if observed else None
    if not found:
        raise UsageSentenceError(
            "how often the job fails is not known: give --mtbf, such as --mtbf 8h, or --mtbf 250d "
            "--nodes 128 for nodes that fail every 250 days"
        )
    return found


def _costs(
    observed: Observed | None,
    mtbf: float,
    save_s: float | None,
    stall_s: float | None,
    restart_s: float,
) -> Costs:
    save = save_s if save_s is not None else observed.save if observed else None
    if save is None:
        raise UsageSentenceError(
            "what a save takes is not known: name the FOLDER with the reports of a run, or give "
            "--save-seconds"
        )
    if stall_s is None:
        # One that was told how long a save takes, and no more, blocks.
        stall_s = observed.stall if observed and save_s is None else save
    return Costs(mtbf, min(stall_s, save), save, restart_s)


def _why(costs: Costs, observed: Observed | None) -> list[str]:
    """The reasoning, a sentence each."""
    waits = f", of which it waits {human_seconds(observed.wait)} for slots" if observed else ""
    lines = [
        f"The job fails every {human_seconds(costs.mtbf)}.",
        f"A save holds training for {human_seconds(costs.stall)}, and is durable after "
        f"{human_seconds(costs.save)}{waits}.",
    ]
    if costs.save + costs.restart >= costs.mtbf:
        lines.append(
            "A save and a restart together take longer than the job runs between failures: hardly "
            "any save is of use. Save faster, or use fewer nodes; no interval mends this."
        )
    if costs.unbounded < costs.shortest:
        lines.append(
            "Failures alone would ask for an interval of "
            f"{human_seconds(costs.unbounded)}, but a save has to be durable before the next one "
            "begins. Saves that are durable sooner would lose less."
        )
    else:
        lines.append(
            "Shorter intervals hold training more often; after longer ones a failure costs more."
        )
    if costs.stall < costs.save:
        lines.append(
            "Training goes on while the save is written, so the stall counts, and not the whole "
            f"save; if it blocked, {human_seconds(costs.young)} would be best."
        )
    return lines


def _rows(costs: Costs, observed: Observed | None) -> list[tuple[str, float]]:
    best = costs.best
    rows = [("best", best), ("twice", 2 * best)]
    if best / 2 >= costs.shortest:
        rows.insert(0, ("half", best / 2))
    if observed and observed.interval:
        rows.append(("now", observed.interval))
    return rows


def _as_json(costs: Costs, observed: Observed | None) -> dict[str, Any]:
    return {
        "interval_s": costs.best,
        "lost": costs.lost(costs.best),
        "bound_by": "saves" if costs.unbounded < costs.shortest else "failures",
        "mtbf_s": costs.mtbf,
        "stall_s": costs.stall,
        "save_s": costs.save,
        "wait_s": observed.wait if observed else None,
        "restart_s": costs.restart,
        "young_s": costs.young,
        "observed": None
        if observed is None
        else {
            "storms": observed.storms,
            "restarts": observed.restarts,
            "interval_s": observed.interval,
            "lost": None if not observed.interval else costs.lost(observed.interval),
        },
        "why": _why(costs, observed),
    }


def _show(costs: Costs, observed: Observed | None) -> None:
    say(
        f"Save every {human_seconds(costs.best)} of training: "
        f"{costs.lost(costs.best):.1%} of the time is lost."
    )
    if observed:
        say(f"From {plural(observed.storms, 'checkpoint')}:")
    for line in _why(costs, observed):
        say(line)
    say()
    table = Table(*columns("<interval", ">", ">lost", ">held by saves", ">redone and restarts"))
    for name, interval in _rows(costs, observed):
        lost, held = costs.lost(interval), costs.held(interval)
        shares = (f"{share:.2%}" for share in (lost, held, lost - held))
        table.add(name, human_seconds(interval), *shares)
    table.show()


@click.command(short_help="Say how often to save, from what saves and failures cost.")
@click.argument("folder", type=click.Path(), required=False)
@click.option(
    "--mtbf",
    metavar="TIME",
    callback=_time,
    help="Mean time between failures of the job, or with --nodes of each node. Without it, how "
    "often the processes in the reports were replaced.",
)
@click.option(
    "--nodes",
    metavar="N",
    type=click.IntRange(min=1),
    help="How many nodes the job has, each of which fails as --mtbf says.",
)
@click.option(
    "--save-seconds",
    "save_s",
    metavar="TIME",
    callback=_time,
    help="From the begin of a save until it is durable, in place of what the reports say.",
)
@click.option(
    "--stall-seconds",
    "stall_s",
    metavar="TIME",
    callback=_time,
    help="How long a save holds training: of save_async() the copy in memory.  [default: what the "
    "reports say, or all of --save-seconds]",
)
@click.option(
    "--restart-seconds",
    "restart_s",
    metavar="TIME",
    callback=_time,
    help="From a failure until training goes on.  [default: 0]",
)
@json_option
def command(
    folder: str | None,
    mtbf: float | None,
    nodes: int | None,
    save_s: float | None,
    stall_s: float | None,
    restart_s: float | None,
    as_json: bool,
) -> None:
    """Says how often to save, so that least time is lost, and why.

    What a save costs is read from the reports that a run has left in FOLDER (IOSHAPE_TRACE), or
    given by options. Times are seconds, or have a unit, such as 30m, 4h, 250d.

    \b
    ioshape advise /scratch/reports --mtbf 8h
    ioshape advise /scratch/reports --mtbf 250d --nodes 1024 --restart-seconds 5m
    ioshape advise --mtbf 3h --save-seconds 40 --stall-seconds 1.2

    Exit code: 0; 1 if a line is not a report, which is said on stderr.
    """
    if mtbf == 0:
        raise UsageSentenceError("cannot advise a job with --mtbf 0: it never trains")
    if nodes is not None and mtbf is None:
        raise UsageSentenceError("--nodes needs --mtbf, which says how often each of them fails")
    observed, problems = _observe(folder) if folder is not None else (None, False)
    found = _mtbf(mtbf, nodes or 1, observed)
    costs = _costs(observed, found, save_s, stall_s, restart_s or 0.0)
    if as_json:
        say_json(_as_json(costs, observed))
    else:
        _show(costs, observed)
    click.get_current_context().exit(int(problems))
