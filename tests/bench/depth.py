# SPDX-License-Identifier: Apache-2.0
"""Measure the in-flight controller on modelled storages. Their clock is simulated."""

import json
import subprocess
from statistics import median
from typing import Any

from tree import build_folder

from .setting import Figure

LIMIT_S = 300
#: The models are noisy, so each figure is the median over these seeds.
SEEDS = (1, 2, 3, 4, 5)

Found = dict[str, dict[str, Any]]


def run(seed: int) -> Found:
    """Return what tests/c/support/depth.c measures, by storage."""
    done = subprocess.run(
        [build_folder() / "tests" / "c" / "depth", str(seed)],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    found: Found = json.loads(done.stdout)
    return found


def figure(name: str, key: str, runs: list[Found], relation: Any, target: float) -> Figure:
    values = {storage: median(float(found[storage][key]) for found in runs) for storage in runs[0]}
    worst = (min if relation == ">=" else max)(values.values())
    places = 3 if target < 1 else 0
    each = ", ".join(f"{storage} {value:.{places}f}" for storage, value in values.items())
    return Figure(name, worst, relation, target, f"modelled: {each}")


def measure() -> tuple[list[Figure], list[Found]]:
    runs = [run(seed) for seed in SEEDS]
    figures = [
        figure("depth_regret", "ratio", runs, ">=", 0.95),
        figure("depth_reaction_ms", "reaction_ms", runs, "<=", 300),
        figure("depth_recovery_ms", "recovery_ms", runs, "<=", 1000),
    ]
    return figures, runs
