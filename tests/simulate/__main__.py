# SPDX-License-Identifier: Apache-2.0
"""Run one simulation; see --help. PYTHONPATH must be what tests/support/tree.py prints."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from . import picture, redis_load
from .order import ORDERS
from .report import AT_ONCE, Case, as_json, compare, storm
from .storage import HDD, SSD
from .workload import jobs

TABLE = "{:26}{:>12}{:>11}{:>9}{:>11}{:>12}{:>7}"


def show(case: Case) -> None:
    found = compare(case)
    print(f"{case.name}: {found.load:.0%} of the storage's bandwidth is asked for")
    titles = ("order", "lost to I/O", "to at once", "lost", "mean save", "longest", "Jain")
    print(TABLE.format(*titles))
    for order, share in found.io.items():
        one = found.found[order]
        row = [f"{share:.3%}", f"{found.ratio(AT_ONCE, order):.2f}", f"{one.lost:.2%}"]
        row += [f"{one.mean_save_s:.0f} s", f"{one.longest_save_s:.0f} s", f"{one.jain:.2f}"]
        print(TABLE.format(order, *row))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulate",
        description="Jobs that save checkpoints to one storage, in several orders. docs/scale.md "
        "says what is modelled.",
    )
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3, help="how many clusters are drawn")
    parser.add_argument("--storage", choices=("hdd", "ssd"), default="hdd")
    parser.add_argument("--bandwidth", type=float, default=1e12, help="bytes per second")
    parser.add_argument("--stretch", type=float, default=1.0, help="of the intervals")
    parser.add_argument("--blocking", action="store_true", help="training waits for its saves")
    parser.add_argument("--storm", action="store_true", help="all jobs save at the same moment")
    parser.add_argument("--redis", type=float, metavar="SECONDS", help="slots.lua for so long")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    storage = replace({"hdd": HDD, "ssd": SSD}[given.storage], bandwidth=given.bandwidth)
    case = Case(
        given.storage,
        storage,
        background=not given.blocking,
        stretch=given.stretch,
        count=given.jobs,
        nodes=given.nodes,
        hours=given.hours,
        seeds=tuple(range(1, given.seeds + 1)),
    )
    if given.plot:
        picture.draw(storage, given.plot, count=given.jobs, nodes=given.nodes, seed=1)
    elif given.redis:
        found = redis_load.measure(storage, given.jobs, given.nodes, given.redis)
        told = {**found, "storm": redis_load.measure_storm(storage, given.jobs, given.nodes, 15)}
        print(json.dumps(told, indent=1))
    elif given.storm:
        work = jobs(given.jobs, given.nodes, given.bandwidth, 1)
        for order in (AT_ONCE, *ORDERS):
            makespan, mean = storm(work, storage, order)
            print(f"{order:10} all done {makespan:.0f} s, mean of the nodes {mean:.0f} s")
    elif given.json:
        print(json.dumps(as_json(compare(case)), indent=1))
    else:
        show(case)


if __name__ == "__main__":
    main()
