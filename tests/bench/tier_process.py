# SPDX-License-Identifier: Apache-2.0
"""Save over tiers to a slow filesystem, from one node or from many at once.

Each node has its own tier below `near`, and a mount. The last mount belongs to the neighbours, or
to the node where the training restarts. Samples are printed as JSON. Nodes are forked from this
process, so it must not start a thread before.

    python -m tests.bench.tier_process one|many '{"mounts": […], "near": …, "n_bytes": …, …}'
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ioshape
import torch
from ioshape._cli import bench_members
from ioshape._cli.bench_members import Crowd, Member
from ioshape._core.context import Context
from ioshape._tier.tier import Tier

from .cache import evict
from .storm_process import see_instead, slow_down

NODES = 32
READERS = 8
SAVES = 3  # saves of one measured training
PATIENCE_S = 900.0
#: The share of drains. Saves have a share of 100.
SHARE = 1

State = dict[str, torch.Tensor]
Found = dict[str, Any]


def state_of(n_bytes: int) -> State:
    return {"weight": torch.empty(n_bytes, dtype=torch.uint8).random_()}


def sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


class Near:
    """A node's tier."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.tier = Tier(Context(), str(folder))

    def save(self, state: State, path: Path) -> None:
        place = self.tier.path_for(str(path), state["weight"].nbytes)
        ioshape.save(state, place)
        self.tier.keep(str(path))

    def drain(self) -> None:
        Tier(Context(share=SHARE), str(self._folder), keep_last=1).drain()


# ---- One node -----------------------------------------------------------------------------------


def stalls(near: Near, folder: Path, state: State, pause_s: float) -> Found:
    """Measure how long saves block a training that computes between them."""

    def train(save: Callable[[Path], None]) -> float:
        held = 0.0
        for number in range(SAVES):
            held += timed(lambda: save(folder / f"{number}.pt"))  # noqa: B023 - it is called here
            time.sleep(pause_s)
        return held

    def save_near(path: Path) -> None:
        near.save(state, path)
        drains.append(threading.Thread(target=near.drain))
        drains[-1].start()

    def save_there(path: Path) -> None:
        ioshape.save(state, path)

    direct = train(save_there)
    drains: list[threading.Thread] = []
    over = train(save_near)
    for one in drains:
        one.join()
    return {"direct": direct, "tier": over}


def carries(near: Near, folder: Path, state: State, first: int) -> Found:
    """Time several ways to bring the same bytes to the destination, one after the other."""
    near.save(state, folder / "drained.pt")
    place = near.tier.find(str(folder / "drained.pt"))
    assert place is not None

    def save_by_torch() -> None:
        torch.save(state, folder / "torch.pt")
        sync(folder / "torch.pt")

    def copy() -> None:
        shutil.copyfile(place, folder / "copied.pt")
        sync(folder / "copied.pt")

    def save() -> None:
        ioshape.save(state, folder / "direct.pt")

    ways = {"drain": near.drain, "save": save, "torch.save": save_by_torch, "cp": copy}
    names = [*ways]
    turned = [names[(first + i) % len(names)] for i in range(len(names))]
    return {name: timed(ways[name]) for name in turned}


def restarts(near: Near, path: Path, elsewhere: Path) -> Found:
    """Time loads with cold caches: from the tier, and through another mount of the destination."""
    place = near.tier.find(str(path))
    assert place is not None
    evict(Path(place))
    evict(elsewhere)
    found = {"tier": timed(lambda: ioshape.load(place))}
    return {**found, "destination": timed(lambda: ioshape.load(elsewhere))}


def one_node(given: Found) -> Found:
    state = state_of(given["n_bytes"])
    here, other = Path(given["mounts"][0]), Path(given["mounts"][-1])
    found: Found = {"stalls": [], "carries": [], "restarts": []}
    for number in range(given["rounds"] + 1):
        folder = here / f"one-{number}"
        folder.mkdir()
        near = Near(Path(given["near"], f"one-{number}"))
        one = {
            "stalls": stalls(near, folder, state, given["pause_s"]),
            "carries": carries(near, folder, state, number),
        }
        path = folder / "drained.pt"
        one["restarts"] = restarts(near, path, other / path.relative_to(here))
        for name, sample in one.items() if number else ():  # the first round warms up
            found[name].append(sample)
        shutil.rmtree(folder)
        near.tier.close()
        shutil.rmtree(Path(given["near"], f"one-{number}"))
    return found


# ---- Many nodes ---------------------------------------------------------------------------------


def node(given: Found, number: int, folder: Path) -> Callable[[Connection], None]:
    """Return the work of a node: it saves in the ways that it receives, and sends the seconds."""
    mounts = [Path(path) for path in given["mounts"]]

    def work(connection: Connection) -> None:
        see_instead(mounts[0], mounts[number % (len(mounts) - 1)])
        state = state_of(given["n_bytes"])
        near = Near(Path(given["near"], f"node-{number}"))
        turn = 0

        def save_by_torch(path: Path) -> None:
            torch.save(state, path)
            sync(path)

        while True:
            way = connection.recv()
            path = folder / f"{way}-{turn}-{number}.pt"
            if way == "drain":
                near.save(state, path)
            connection.send("ready")
            connection.recv()
            save = near.drain if way == "drain" else lambda: save_by_torch(path)  # noqa: B023
            connection.send(timed(save))
            connection.recv()
            path.unlink()
            turn += 1

    return work


def round_of(
    way: str, crowd: Crowd, nodes: list[Member], readers: list[Member], slow: float
) -> Found:
    """Return the times of a round, in the time of the model."""
    crowd.ask(nodes, PATIENCE_S, way)
    for one in readers:
        one.tell("begin")
    took = crowd.ask(nodes, PATIENCE_S, "go")
    heard = crowd.ask(readers, PATIENCE_S, "end")
    for one in nodes:
        one.tell("remove")
    return {
        "seconds": [one / slow for one in took],
        "reads_ns": [one.took_ns / slow for told in heard for one in told],
    }


def many_nodes(given: Found) -> Found:
    mounts = [Path(path) for path in given["mounts"]]
    folder, small = mounts[0] / "many", mounts[-1] / "neighbours"
    folder.mkdir()
    small.mkdir()
    bench_members.prepare(small)
    slow_down(given["slow"])
    found: Found = {"torch": [], "drain": []}
    with Crowd() as crowd:
        nodes = [crowd.start(f"node {i}", node(given, i, folder)) for i in range(NODES)]
        readers = [
            crowd.start(f"reader {i}", bench_members.reader(small, i)) for i in range(READERS)
        ]
        crowd.hear(readers, PATIENCE_S)
        for number in range(given["rounds"] + 1):
            for way, samples in found.items():
                sample = round_of(way, crowd, nodes, readers, given["slow"])
                if number:
                    samples.append(sample)
    return found


def main(what: str, text: str) -> None:
    given = json.loads(text)
    print(json.dumps((one_node if what == "one" else many_nodes)(given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
