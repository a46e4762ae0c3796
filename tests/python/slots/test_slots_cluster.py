# SPDX-License-Identifier: Apache-2.0
"""Pools in a Redis Cluster: spread over its nodes, moved between them, and a master that dies."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from coordinators import RefusedByRedis, await_true
from ioshape._slots.pools import Operator
from processes import environment
from redis_cluster import MASTERS, Cluster, redis_cluster

CAPACITY = 2
LEASE_MS = 1500
WRITERS = 5  # of each pool

# Takes slots of its pools repeatedly until stdin ends, and prints when it held each.
PROGRAM = """
import json, random, sys, threading, time
import ioshape
from ioshape._core import context

context.test_options["lease_ms"] = int(sys.argv[2])

ended, telling = threading.Event(), threading.Lock()

def work(pool):
    while not ended.is_set():
        slot = ioshape.slot(pool=pool, nbytes=1 << 30)
        began = time.monotonic()
        info = slot.info
        time.sleep(random.uniform(0.01, 0.1))
        lost, until = slot.lost, time.monotonic()
        slot.release()
        told = json.dumps([pool, info.coordinator, info.fence, lost, began, until])
        with telling:
            print(told, flush=True)

threads = [threading.Thread(target=work, args=[pool]) for pool in json.loads(sys.argv[1])]
for thread in threads:
    thread.start()
sys.stdin.read()
ended.set()
for thread in threads:
    thread.join()
"""


@dataclass(frozen=True)
class Held:
    """A slot that a writer held. Times are those of this host's clock."""

    pool: str
    coordinator: str
    fence: int
    lost: bool
    began: float
    until: float


class Writers:
    """Processes that use the same pools."""

    def __init__(self, cluster: Cluster, pools: list[str]) -> None:
        self.held: list[Held] = []
        variables = {
            "IOSHAPE_COORDINATOR": cluster.address,
            "IOSHAPE_SLOTS": str(CAPACITY),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(pools), str(LEASE_MS)],
                env=environment(**variables, IOSHAPE_JOB=f"job{i}", RANK=str(i)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(WRITERS)
        ]
        self._readers = [
            threading.Thread(target=self._read, args=[process]) for process in self.processes
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.held.append(Held(*json.loads(line)))

    def await_slots(self, pools: list[str], number: int = 3 * WRITERS) -> None:
        """Wait until the coordinator has granted so many more slots of each pool."""
        since, end = time.monotonic(), time.monotonic() + 60
        while any(self._ordered(pool, since) < number for pool in pools):
            assert time.monotonic() < end, self.held[-30:]
            time.sleep(0.05)

    def _ordered(self, pool: str, since: float) -> int:
        held = list(self.held)
        return sum(
            one.pool == pool and one.began > since and one.coordinator == "redis" for one in held
        )

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, reader in zip(self.processes, self._readers, strict=True):
            assert process.wait(60) == 0
            reader.join()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def most_at_a_time(held: list[Held]) -> int:
    """Return the largest number of slots that were held at a time."""
    events = [(one.began, 1) for one in held] + [(one.until, -1) for one in held]
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def check(held: list[Held], pools: list[str]) -> None:
    for pool in pools:
        ordered = [one for one in held if one.pool == pool and one.coordinator == "redis"]
        assert most_at_a_time([one for one in ordered if not one.lost]) <= CAPACITY
        fences = [one.fence for one in ordered]
        assert len(set(fences)) == len(fences)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with redis_cluster() as made:
        yield made


def pools_of_each_node(cluster: Cluster) -> list[str]:
    """Return the name of a pool for each master."""
    found: dict[int, str] = {}
    for number in count():
        name = f"pool{number}"
        found.setdefault(cluster.master_of(cluster.slot_of(name)), name)
        if len(found) == MASTERS:
            return [found[index] for index in range(MASTERS)]
    raise AssertionError


def is_at_rest(operator: Operator, pool: str) -> bool:
    status = operator.status(pool)
    return (status.used, status.holder_count, status.waiter_count) == (0, 0, 0)


@pytest.mark.slow
def test_pools_are_spread_moved_and_outlive_a_master(cluster: Cluster) -> None:
    pools = pools_of_each_node(cluster)
    writers = Writers(cluster, pools)
    try:
        writers.await_slots(pools)
        for index, pool in enumerate(pools):
            key = f"{{ios:{pool}}}:v7:m"
            assert cluster.nodes[index].ask("EXISTS", key) == 1
            with pytest.raises(RefusedByRedis, match="MOVED"):
                cluster.nodes[index - 1].ask("EXISTS", key)
        # While keys move, the server refuses calls that create a key, sometimes in the middle of a
        # call.
        slot = cluster.slot_of(pools[0])
        cluster.move(slot, cluster.nodes[0], cluster.nodes[1], pause_s=0.7)
        writers.await_slots(pools)
        assert cluster.nodes[1].ask("EXISTS", f"{{ios:{pools[0]}}}:v7:m") == 1
        # Node 1 has two pools now. It dies, and its replica takes over.
        cluster.nodes[1].kill()
        writers.await_slots(pools)
        assert cluster.nodes[MASTERS + 1].info()["role"] == "master"
        writers.end()
        # All counts are consistent: no call has left anything half done.
        operator = Operator(cluster.address)
        for pool in pools:
            await_true(lambda name=pool: is_at_rest(operator, name), f"all slots of {pool}")  # type: ignore[misc]
    finally:
        writers.close()
    check(writers.held, pools)
    assert not any(one.lost for one in writers.held if one.pool == pools[2])
