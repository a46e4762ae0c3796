# SPDX-License-Identifier: Apache-2.0
"""What the reports of a run tell about its saves and failures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from ioshape.cli.trace import reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ioshape.cli.trace.reports import Gust, Recorded


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
    whole = [storm for storm in reports.gusts(saves) if not storm.failed and not storm.skipped]
    if not whole:
        return None
    restarts = _restarts(saves)
    span = max(save.ended_s for save in saves) - saves[0].started_s
    return Observed(
        storms=len(whole),
        # Ranks train together, so that the one that is held longest holds them all.
        stall=fmean(max(save.held_s for save in storm.saves) for storm in whole),
        save=fmean(storm.makespan_s for storm in whole),
        wait=fmean(storm.most_waited_s for storm in whole),
        interval=_interval(whole),
        mtbf=span / restarts if restarts else None,
        restarts=restarts,
    )


def _interval(storms: Sequence[Gust]) -> float | None:
    """Of training, between the saves of one life: a longer gap may be a restart."""
    gaps = [
        after.began_s - before.began_s - max(save.held_s for save in before.saves)
        for before, after in pairwise(storms)
    ]
    return max(median(gaps), 0.0) if gaps else None


def _restarts(saves: Sequence[Recorded]) -> int:
    """How often other processes took over, as the rank saw it that saw most."""
    lives: dict[int, set[tuple[str, int]]] = {}
    for save in saves:
        lives.setdefault(save.rank, set()).add((save.host, save.pid))
    return max(map(len, lives.values())) - 1
