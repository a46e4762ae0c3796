# SPDX-License-Identifier: Apache-2.0
"""Run the long chaos campaign: the scenes of tests/support/harm/chaos_scenes.py, many times.

Scale 1 has at least 500 kills of Redis, 2,000 kills of clients, 200 stops that outlast a lease, 100
failovers and 100 partitions. It takes about a quarter of an hour, because the scenes wait most of
the time. The library and the client are in the folder that IOSHAPE_TEST_BUILD names. If
IOSHAPE_TEST_CHAOS_KEEP names a folder, logs of scenes with faults are kept there.
"""

import multiprocessing
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from chaos import NotPermitted
from chaos_judge import Verdict
from chaos_scenes import SCENES

#: Number of scenes that run at the same time.
AT_ONCE = 5

#: Rounds of each scene at scale 1, and rounds in one run of the scene.
ROUNDS = {
    "redis_dies_with_file": (260, 20),
    "redis_dies_without": (260, 20),
    "redis_dies_at_rest": (260, 20),
    "master_fails": (110, 10),
    "link_is_cut": (110, 10),
    "clients_die_redis": (1100, 100),
    "clients_die_local": (1100, 100),
    "clients_stop_redis": (260, 40),
    "clients_stop_local": (260, 40),
    "saves_go_on_redis": (160, 20),
    "saves_go_on_local": (160, 20),
    "line_is_bad": (100, 10),
    "redis_refuses": (100, 10),
    "redis_stops": (100, 10),
    "slots_of_the_dead_redis": (60, 20),
    "slots_of_the_dead_local": (60, 20),
}

FIGURES = {
    "chaos_over": "over",
    "chaos_dup_fence": "dup_fences",
    "chaos_fence_back": "fences_back",
    "chaos_failed_turns": "failed_turns",
    "chaos_failed_saves": "failed_saves",
    "chaos_used_at_rest": "used_at_rest",
    "chaos_hung": "hung",
}


def _play(name: str, seed: int, rounds: int) -> tuple[str, int, Verdict | str]:
    try:
        return name, seed, SCENES[name](seed, rounds)
    except NotPermitted as error:
        return name, seed, f"not permitted: {error}"
    except Exception:  # an exception in a scene is reported, and other scenes go on
        return name, seed, traceback.format_exc()


class Campaign:
    """The results so far."""

    def __init__(self) -> None:
        self.all = Verdict()
        self.reclaims: dict[str, list[float]] = {"redis": [], "local": []}
        self.faults: list[str] = []
        self.broken: list[str] = []
        self.played: dict[str, int] = {}

    def take(self, name: str, seed: int, verdict: Verdict | str) -> None:
        """Add the result of one scene."""
        if isinstance(verdict, str):
            self.broken.append(f"{name}, seed {seed}: {verdict}")
            return
        self.played[name] = self.played.get(name, 0) + 1
        kind = "local" if name.endswith("local") else "redis"
        self.reclaims[kind] += verdict.reclaims
        self.faults += [f"{name}, seed {seed}: {fault}" for fault in verdict.faults()]
        self.all.add(verdict)

    def figures(self) -> dict[str, float]:
        """Return the figures, by the names in the output of the benchmark."""
        found: dict[str, float] = {
            figure: len(getattr(self.all, name)) for figure, name in FIGURES.items()
        }
        found["chaos_over_after_loss"] = len(self.all.over_after_loss)
        found["chaos_broken_scenes"] = len(self.broken)
        for figure, kind in (("redis_reclaim_vs_bound", "redis"), ("local_reclaim_ms", "local")):
            if self.reclaims[kind]:
                found[figure] = max(self.reclaims[kind])
        return found

    def told(self) -> dict[str, Any]:
        """Return the results in a form for JSON."""
        return {
            "figures": self.figures(),
            "counts": dict(sorted(self.all.counts.items())),
            "longest_ms": self.all.longest,
            "over_after_loss": self.all.over_after_loss[:20],
            "faults": self.faults[:100],
            "broken": self.broken[:20],
            "played": self.played,
            "reclaim_samples": {kind: sorted(of) for kind, of in self.reclaims.items()},
        }


def measure(scale: float) -> dict[str, Any]:
    """Run the scenes, several at a time."""
    campaign = Campaign()
    parts = []
    for name, (total, each) in ROUNDS.items():
        count = max(1, round(total * scale / each))
        parts += [(number / count, name, 1000 + number, each) for number in range(count)]
    parts.sort()  # runs of all scenes are mixed evenly
    # "spawn" instead of fork: the children must not inherit signal handlers or locks of threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, mp_context=context) as pool:
        waiting = {pool.submit(_play, *part[1:]) for part in parts}
        for done in as_completed(waiting):
            campaign.take(*done.result())
    return campaign.told()
