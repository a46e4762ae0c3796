# SPDX-License-Identifier: Apache-2.0
"""The number of writers that a pool learns against the best one, on modelled storages in model
time: tests/support/learning.c, with the library's own rule. The same figures in every run.

    python -m tests.bench.capacity

prints what was found.
"""

import json
import subprocess
from typing import Any

from tree import build_folder

from .setting import Figure

LIMIT_S = 300

Found = list[dict[str, Any]]


def run() -> Found:
    done = subprocess.run(
        [build_folder() / "tests" / "capacity"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    found: Found = json.loads(done.stdout)
    return found


def figure(found: Found) -> Figure:
    """Comparisons with other numbers, which the pool makes meanwhile, count as well."""
    ratios = {one["storage"]: one["learnt_bytes_per_s"] / one["best_bytes_per_s"] for one in found}
    remark = ", ".join(
        f"{one['storage']} {ratios[one['storage']]:.3f} (learnt {one['learnt_writers']:.0f}, "
        f"best {one['best_writers']})"
        for one in found
    )
    return Figure("capacity_vs_best", min(ratios.values()), ">=", 0.95, remark)


if __name__ == "__main__":
    print(figure(run()))
