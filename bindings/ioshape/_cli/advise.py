# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape advise": computes the best interval between saves, after Young and Daly.

The model: failures are random, with a mean time M between them. A job trains for T and then begins
a save, which stalls training for h. The save is durable after d, including its wait for a slot;
training goes on meanwhile. After a failure the job returns to the latest durable save, and needs
R to restart.

The share of the time until a failure that is not lost is

    E(T) = T exp(-(T + d + R) / M) / (M (1 - exp(-(T + h) / M)))

For a save that blocks, h = d, and this is Daly's exact form. dE/dT = 0 where
T = M (1 - exp(-(T + h) / M)), independently of d and R. For small h that is Young's sqrt(2 h M).
d only sets a lower limit: a save must be durable before the next one begins.
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
    """Costs of saves and failures, in seconds."""

    #: mean time between failures of the job
    mtbf: float
    #: time for which a save stalls training
    stall: float
    #: time from the begin of a save until it is durable, including its wait for a slot
    save: float
    #: time from a failure until training goes on
    restart: float = 0.0

    @property
    def shortest(self) -> float:
        """The shortest training time between two saves: each must be durable before the next."""
        return max(self.save - self.stall, 0.0)

    def kept(self, interval: float) -> float:
        """Return E(T): the share of the time that goes into training that is not lost."""
        left = math.exp(-(interval + self.save + self.restart) / self.mtbf)
        cycle = -math.expm1(-(interval + self.stall) / self.mtbf)
        if interval <= 0:  # the limit of E(T): if saves stall at all, the job only saves
            return 0.0 if self.stall > 0 else left
        return min(interval * left / (self.mtbf * cycle), 1.0) if cycle > 0 else 1.0

    def lost(self, interval: float) -> float:
        """Return the share of the time that is lost: stalls, lost training and restarts."""
        return 1 - self.kept(interval)

    def held(self, interval: float) -> float:
        """Return the share of the time for which saves stall training that is not lost later."""
        return self.kept(interval) * self.stall / interval if interval > 0 else 0.0

    @property
    def unbounded(self) -> float:
        """The best interval if saves were durable at once."""
        ratio = self.stall / self.mtbf
        if ratio <= 0:
            return 0.0
        low, high = 0.0, 1.0  # bounds of x = T/M, the solution of x = 1 - exp(-(x + ratio))
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if -math.expm1(-(middle + ratio)) > middle else (low, middle)
        return high * self.mtbf

    @property
    def best(self) -> float:
        """The interval that loses least."""
        return max(self.unbounded, self.shortest)

    @property
    def young(self) -> float:
        """The interval by Young's rule, for saves that stall training until they are durable."""
        return math.sqrt(2 * self.save * self.mtbf)


# ---- Costs from the reports of a run -------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """Figures of a run, in seconds. None means that the run does not show the figure."""

    #: number of complete checkpoints
    storms: int
    stall: float
    save: float
    wait: float
    interval: float | None
    mtbf: float | None
    restarts: int


def observe(saves: Sequence[Recorded]) -> Observed | None:
    """Return the figures of a run; None if no checkpoint succeeded.

    Args:
        saves: its saves, in the order in which they began.
    """
    # If one rank failed or skipped its save, the checkpoint cannot be used.
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
    """Return the usual training time between two checkpoints; None if there is only one.

    It is the median, because long gaps may be restarts.
    """
    gaps = [after.began_s - before.began_s - before.stall_s for before, after in pairwise(found)]
    return max(median(gaps), 0.0) if gaps else None


def _restarts(saves: Sequence[Recorded]) -> int:
    """Return how often the job restarted: the largest number of process changes of a rank."""
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
            "the time between failures is not known; give --mtbf, such as --mtbf 8h, or --mtbf "
            "250d --nodes 128 for nodes that fail every 250 days"
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
            "the duration of a save is not known; name the FOLDER with the reports of a run, or "
            "give --save-seconds"
        )
    if stall_s is None:
        # If only --save-seconds is known, the save is assumed to block for all of it.
        stall_s = observed.stall if observed and save_s is None else save
    return Costs(mtbf, min(stall_s, save), save, restart_s)


def _why(costs: Costs, observed: Observed | None) -> list[str]:
    """Return the reasons for the advice, as sentences."""
    waits = f", including a wait of {human_seconds(observed.wait)} for a slot" if observed else ""
    lines = [
        f"The job fails every {human_seconds(costs.mtbf)}.",
        f"A save stalls training for {human_seconds(costs.stall)} and is durable after "
        f"{human_seconds(costs.save)}{waits}.",
    ]
    if costs.save + costs.restart >= costs.mtbf:
        lines.append(
            "A save and a restart together take longer than the time between failures, so few "
            "saves are ever used. Save faster or use fewer nodes; no interval helps."
        )
    if costs.unbounded < costs.shortest:
        lines.append(
            f"For failures alone, an interval of {human_seconds(costs.unbounded)} would be best, "
            "but each save must be durable before the next one begins. Faster saves would lose "
            "less time."
        )
    else:
        lines.append(
            "Shorter intervals stall training more often; with longer intervals, each failure "
            "loses more work."
        )
    if costs.stall < costs.save:
        lines.append(
            "Training continues while the save is written, so only the stall counts. If the save "
            f"blocked training, {human_seconds(costs.young)} would be best."
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
        say(f"Based on {plural(observed.storms, 'checkpoint')}:")
    for line in _why(costs, observed):
        say(line)
    say()
    table = Table(
        *columns("<interval", ">", ">lost", ">stalled by saves", ">redone work and restarts")
    )
    for name, interval in _rows(costs, observed):
        lost, held = costs.lost(interval), costs.held(interval)
        shares = (f"{share:.2%}" for share in (lost, held, lost - held))
        table.add(name, human_seconds(interval), *shares)
    table.show()


@click.command(short_help="Recommend how often to save.")
@click.argument("folder", type=click.Path(), required=False)
@click.option(
    "--mtbf",
    metavar="TIME",
    callback=_time,
    help="Mean time between failures of the job; with --nodes, of each node.  [default: from the "
    "process restarts in the reports]",
)
@click.option(
    "--nodes",
    metavar="N",
    type=click.IntRange(min=1),
    help="Number of nodes of the job. --mtbf is then the value of one node.",
)
@click.option(
    "--save-seconds",
    "save_s",
    metavar="TIME",
    callback=_time,
    help="Time from the start of a save until it is durable. Overrides the reports.",
)
@click.option(
    "--stall-seconds",
    "stall_s",
    metavar="TIME",
    callback=_time,
    help="Time for which a save stalls training; for save_async(), the copy in memory.  [default: "
    "from the reports, or --save-seconds]",
)
@click.option(
    "--restart-seconds",
    "restart_s",
    metavar="TIME",
    callback=_time,
    help="Time from a failure until training continues.  [default: 0]",
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
    """Recommend the interval between saves that loses the least time, with reasons.

    The cost of a save comes from the reports that a run left in FOLDER (IOSHAPE_TRACE), or from the
    options. Times are in seconds, or have a unit, such as 30m, 4h, 250d.

    Examples:

    \b
    ioshape advise /scratch/reports --mtbf 8h
    ioshape advise /scratch/reports --mtbf 250d --nodes 1024 --restart-seconds 5m
    ioshape advise --mtbf 3h --save-seconds 40 --stall-seconds 1.2

    Exit code: 0; 1 if a line is not a report (the line is named on stderr).
    """
    if mtbf == 0:
        raise UsageSentenceError("cannot advise a job with --mtbf 0: it never trains")
    if nodes is not None and mtbf is None:
        raise UsageSentenceError("--nodes needs --mtbf, the mean time between failures of one node")
    observed, problems = _observe(folder) if folder is not None else (None, False)
    found = _mtbf(mtbf, nodes or 1, observed)
    costs = _costs(observed, found, save_s, stall_s, restart_s or 0.0)
    if as_json:
        say_json(_as_json(costs, observed))
    else:
        _show(costs, observed)
    click.get_current_context().exit(int(problems))
