# SPDX-License-Identifier: Apache-2.0
"""Kills ranks and Redis at random moments while ranks save together, many times.

It tells what was found: generations that load wrong, that are lost, survivors that hang.
"""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from group_chaos import Verdict, campaign

#: at the same time
LANES = 2

FIGURES = ("bad_generations", "lost_generations", "hangs")


def together(verdicts: list[Verdict]) -> dict[str, Any]:
    """Of several lanes."""
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
    """Kills so many in several directories at once."""
    # Started anew, not forked: threads of whoever calls are not taken along.
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
