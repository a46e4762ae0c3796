# SPDX-License-Identifier: Apache-2.0
"""Run one part of the storm: the engine of "ioshape bench" on simulated nodes.

There is a mount for each node and a last one for the neighbours. As in a cluster, every node sees
its mount at the same path. The plan is the engine's. The counter is a command that prints how many
requests of each kind reached the metadata server, or the folder behind a stripefs. The results are
printed as JSON. Ranks are forked from this process, so it must not start a thread.

    python -m tests.bench.storm_process '{"mounts": […], "counter": …, "plan": {…}, …}'
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ioshape._cli.bench import figures
from ioshape._cli.bench_measure import Plan, Storm
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


def main(text: str) -> None:
    given: dict[str, Any] = json.loads(text)
    preload_ways.add()
    plan = Plan(**{**given["plan"], "ways": tuple(given["plan"]["ways"])})
    mounts = [Path(path) for path in given["mounts"]]
    began = time.monotonic()

    def go_to(node: int) -> None:
        if len(mounts) > 1:  # with one client no node moves, and root is not needed
            see_instead(mounts[0], mounts[node])

    def tell(progress: str) -> None:
        print(f"    {time.monotonic() - began:5.0f} s: {progress}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="storm-", dir=mounts[0]) as folder,
        Storm(plan, Path(folder), tell, go_to) as storm,
    ):
        if plan.rounds:
            storm.measure()
            found = figures(storm, mounts[0])
        else:
            found = count_metadata(storm, given["counter"], first=given["first"])
    print(json.dumps(found))
    if given["picture"] and plan.rounds:
        from .storm_picture import draw  # noqa: PLC0415 - needs matplotlib

        draw(storm, given["picture"])


if __name__ == "__main__":
    main(*sys.argv[1:])
