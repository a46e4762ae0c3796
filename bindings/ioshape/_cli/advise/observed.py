# SPDX-License-Identifier: Apache-2.0
"""What the reports of a run tell about its saves and failures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from ioshape._cli.trace import reports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ioshape._cli.trace.reports import Gust, Recorded


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
    found = reports.checkpoints(saves)
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


def _interval(checkpoints: Sequence[Gust]) -> float | None:
    """Of training, between the saves of one life: a longer gap may be a restart."""
    gaps = [
        after.began_s - before.began_s - before.stall_s for before, after in pairwise(checkpoints)
    ]
    return max(median(gaps), 0.0) if gaps else None


def _restarts(saves: Sequence[Recorded]) -> int:
    """How often other processes took over, as the rank saw it that saw most."""
    lives: dict[int, set[tuple[str, int]]] = {}
    for save in saves:
        lives.setdefault(save.rank, set()).add((save.host, save.pid))
    return max(map(len, lives.values())) - 1
