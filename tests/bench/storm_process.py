# SPDX-License-Identifier: Apache-2.0
"""Run one part of the storm: the engine of "ioshape bench" on simulated nodes.

There is a mount for each node and a last one for the neighbours. As in a cluster, every node sees
its mount at the same path. The plan is the engine's. The storage takes `slow` times as long as its
model says, and all times of the results are those of the model. The counter is a command that
prints how many requests of each kind reached the metadata server, or the folder behind a stripefs.
The results are printed as JSON. Ranks are forked from this process, so it must not start a thread.

    python -m tests.bench.storm_process '{"mounts": […], "counter": …, "plan": {…}, …}'
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ioshape._cli import bench_measure, bench_members
from ioshape._cli.bench import figures
from ioshape._cli.bench_measure import Plan, Storm
from ioshape._cli.bench_members import Member, Operation, RankSetup
from striped import ask

from . import preload_ways


def counts(counter: str | list[str]) -> dict[str, int]:
    """Return how many operations of each kind the metadata server has received."""
    if isinstance(counter, list):
        done = subprocess.run(counter, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        counted: dict[str, int] = json.loads(done.stdout)
    else:
        counted = json.loads(ask(Path(counter), "statistics"))["metadata"]
    return {name: count for name, count in counted.items() if name != "total"}


def count_metadata(storm: Storm, counter: str | list[str], *, first: bool) -> dict[str, Any]:
    """Count the operations of the first or second save of all ranks in each way.

    There are no neighbours.
    """
    found = {}
    for way in storm.plan.ways:
        if not first:
            storm.save_once(way)
            storm.remove(way)
        before = counts(counter)
        storm.save_once(way)
        after = counts(counter)
        storm.remove(way)
        found[way] = {
            "metadata": {
                name: count - before.get(name, 0)
                for name, count in after.items()
                if count > before.get(name, 0)
            }
        }
    return {"ways": found}


def call(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def see_instead(path: Path, other: Path) -> None:
    """Bind-mount another path over a path, for this process only. This takes root."""
    unshare_mounts, private, bind = 0x20000, 1 << 18 | 1 << 14, 1 << 12
    libc = ctypes.CDLL(None, use_errno=True)
    call(libc.unshare(unshare_mounts))
    call(libc.mount(None, b"/", None, ctypes.c_ulong(private), None))
    call(libc.mount(os.fsencode(other), os.fsencode(path), None, ctypes.c_ulong(bind), None))


# ---- Nodes ---------------------------------------------------------------------------------------


class NodeStorm(Storm):
    """A storm whose ranks are on several simulated nodes, and whose neighbours are on one more."""

    def __init__(self, plan: Plan, folder: Path, mounts: Sequence[Path]) -> None:
        super().__init__(plan, folder)
        self._nodes = max(len(mounts) - 1, 1)
        self._local_ranks = plan.ranks // self._nodes
        self._mounts = mounts

    def start(self, name: str, work: Callable[[Connection], object]) -> Member:
        node = len(self._ranks) // self._local_ranks  # all ranks are started before a neighbour

        def work_there(connection: Connection) -> None:
            if len(self._mounts) > 1:  # with one client no node moves, and root is not needed
                see_instead(self._mounts[0], self._mounts[node])
            work(connection)

        return super().start(name, work_there)

    def setup_of(self, rank: int) -> RankSetup:
        setup = super().setup_of(rank)
        if self._nodes > 1:
            setup.variables.update(
                LOCAL_RANK=str(rank % self._local_ranks),
                LOCAL_WORLD_SIZE=str(self._local_ranks),
                IOSHAPE_TEST_NODE=f"node-{rank // self._local_ranks}",
            )
        return setup


# ---- Storage in slow time ------------------------------------------------------------------------


def slow_down(slow: float) -> None:
    """Let neighbours operate as often, in the time of the model, as beside usual storage."""
    bench_members.REST_S *= slow
    bench_measure.ALONE_S *= slow


def convert_times(storm: Storm, slow: float) -> None:
    """Convert all times of the results from the clock to the time of the model."""

    def ns(time_ns: int) -> int:
        return round(time_ns / slow)

    def converted(operations: list[Operation]) -> list[Operation]:
        return [Operation(one.kind, ns(one.at_ns), ns(one.took_ns)) for one in operations]

    storm.alone = converted(storm.alone)
    for turn in (turn for summary in storm.summaries.values() for turn in summary.rounds):
        turn.at_ns = ns(turn.at_ns)
        turn.operations = converted(turn.operations)
        for rank in turn.ranks:
            rank.begin_ns, rank.returned_ns, rank.end_ns = map(
                ns, (rank.begin_ns, rank.returned_ns, rank.end_ns)
            )
            rank.spans = [(phase, ns(begin), ns(end)) for phase, begin, end in rank.spans]
            rank.report = rank.report and {
                name: value / slow if name.endswith("_s") else value
                for name, value in rank.report.items()
            }


def main(text: str) -> None:
    given: dict[str, Any] = json.loads(text)
    preload_ways.add()
    plan = Plan(**{**given["plan"], "ways": tuple(given["plan"]["ways"])})
    slow = given["slow"]
    mounts = [Path(path) for path in given["mounts"]]
    began = time.monotonic()
    slow_down(slow)

    def tell(progress: str) -> None:
        print(f"    {time.monotonic() - began:5.0f} s: {progress}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="storm-", dir=mounts[0]) as folder,
        NodeStorm(plan, Path(folder), mounts) as storm,
    ):
        storm.tell = tell
        if plan.rounds:
            storm.measure()
            convert_times(storm, slow)
            found = figures(storm, mounts[0])
        else:
            found = count_metadata(storm, given["counter"], first=given["first"])
    print(json.dumps(found))
    if given["picture"] and plan.rounds:
        from .storm_picture import draw  # noqa: PLC0415 - needs matplotlib

        draw(storm, given["picture"])


if __name__ == "__main__":
    main(*sys.argv[1:])
