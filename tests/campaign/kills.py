# SPDX-License-Identifier: Apache-2.0
"""Kill processes before each of their calls in turn, or at a random moment."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from group_chaos import Verdict, lane, scenes

from . import harm
from .trial import Trial

#: Kills of each act in one trial, spread over its calls.
COUNT = 16

#: One of this many trials is a job that saves repeatedly, whose ranks or Redis are killed.
CHAOS_EACH, CHAOS_SCENES = 8, 6


def chaos(seed: int, work: Path) -> Trial:
    with lane(work / f"lane-{seed}", seed) as made:
        waiting = scenes()
        made.random.shuffle(waiting)
        for scene in waiting[:CHAOS_SCENES]:
            made.play(scene)
        verdict: Verdict = made.verdict
    counts = {
        "kills": verdict.kills,
        "kills_torn": len(verdict.bad_checkpoints + verdict.hangs + verdict.broken),
        "kills_lost": len(verdict.lost_checkpoints),
        "kills_litter": len(verdict.leftovers),
    }
    return Trial(counts, findings=verdict.faults)


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    harm.check()

    def attempt(seed: int) -> Trial:
        if seed % CHAOS_EACH == 0:
            return chaos(seed, work)
        done = harm.run("kills", seed, COUNT, work)
        return done.trial("kills", ("torn", "lost", "litter"))

    yield attempt
