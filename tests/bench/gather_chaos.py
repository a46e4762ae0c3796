# SPDX-License-Identifier: Apache-2.0
"""Kills ranks and Redis at random moments while ranks save together, many times.

    python tests/bench/gather_chaos.py --kills 1000

It prints what was found: generations that load wrong, that are lost, survivors that hang.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

if __name__ == "__main__" or multiprocessing.current_process().name != "MainProcess":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from group_chaos import Verdict, campaign

FIGURES = ("bad_generations", "lost_generations", "hangs")


def _lane(folder: Path, kills: int, seed: int, until: float) -> Verdict:
    def tell(verdict: Verdict) -> None:
        told = folder / f"lane-{seed}.json"
        told.write_text(json.dumps(verdict.told(), indent=1), encoding="utf-8")

    return campaign(folder / f"lane-{seed}", kills, seed, until=until, told=tell)


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


def measure(
    kills: int, *, lanes: int = 2, seed: int = 1, seconds: float = float("inf")
) -> dict[str, Any]:
    """Kills so many in several directories at once."""
    until = time.monotonic() + seconds
    # Started anew, not forked: threads of whoever calls are not taken along.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="gather-chaos-") as name,
        ProcessPoolExecutor(lanes, mp_context=context) as pool,
    ):
        each = -(-kills // lanes)
        waiting = [
            pool.submit(_lane, Path(name), each, seed * 1000 + number, until)
            for number in range(lanes)
        ]
        return together([done.result() for done in as_completed(waiting)])


def main() -> int:
    """By hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told = measure(given.kills, lanes=given.lanes, seed=given.seed, seconds=given.seconds)
    text = json.dumps(told, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    return int(any(told[name] for name in (*FIGURES, "leftovers", "broken")))


if __name__ == "__main__":
    sys.exit(main())
