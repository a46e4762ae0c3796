# SPDX-License-Identifier: Apache-2.0
"""Kill ranks and Redis at random moments while ranks save together, many times.

The result counts checkpoints that load wrong or are lost, and surviving ranks that hang.
"""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from group_chaos import Verdict, campaign

#: number of campaigns that run at the same time
LANES = 2

FIGURES = ("bad_generations", "lost_generations", "hangs")


def together(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the combined results of several campaigns."""
    sum_of_all = Verdict()
    for one in verdicts:
        sum_of_all.kills += one.kills
        sum_of_all.counts += one.counts
        for name in ("longest_s", "longest_without_redis_s"):
            setattr(sum_of_all, name, max(getattr(sum_of_all, name), getattr(one, name)))
        for name in (*FIGURES, "leftovers", "broken", "unnamed"):
            getattr(sum_of_all, name).extend(getattr(one, name))
    return sum_of_all.told()


def measure(kills: int) -> dict[str, Any]:
    """Run `kills` kills, divided among several directories at once."""
    # "spawn" instead of fork: the children must not inherit a state that threads of the caller
    # hold.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="gather-chaos-") as name,
        ProcessPoolExecutor(LANES, mp_context=context) as pool,
    ):
        each = -(-kills // LANES)
        waiting = [
            pool.submit(campaign, Path(name) / f"lane-{number}", each, 1000 + number)
            for number in range(LANES)
        ]
        return together([done.result() for done in as_completed(waiting)])
