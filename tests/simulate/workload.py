# SPDX-License-Identifier: Apache-2.0
"""Draw jobs like those in published traces. docs/scale.md names the sources."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

GB = 1e9
DAY_S = 86_400.0

#: Mean time between failures of a node: 419 failures of 2,048 nodes in 54 days (Llama 3).
NODE_MTBF_S = 54 * DAY_S * 2048 / 419
#: Speed at which a node copies its tensors to host memory.
STAGE_BYTES_S = 20 * GB
RESTART_S = 300.0

#: Exponent of the tail: P(more than n nodes) falls as n to this power. So few jobs have most nodes.
TAIL = 0.6
SMALLEST, LARGEST = 8, 8192
#: Bytes of a node in a job of the smallest size, and an exponent: models grow more slowly than
#: nodes.
NODE_BYTES, SHRINKS = 14 * GB, 0.3
#: Scatter of a node's bytes, and of intervals around the best one, as a factor.
SCATTER = 1.6
SHORTEST_S, LONGEST_S = 120.0, 4 * 3600.0


@dataclass(frozen=True)
class Job:
    """A job that runs for the whole time."""

    number: int
    nodes: int
    node_bytes: float
    interval_s: float  # training time between two saves
    #: Time by which its first save is due earlier.
    phase_s: float = 0.0

    @property
    def bytes(self) -> float:
        return self.nodes * self.node_bytes

    @property
    def stage_s(self) -> float:
        """The time for which a background save blocks training."""
        return self.node_bytes / STAGE_BYTES_S

    @property
    def mtbf_s(self) -> float:
        return NODE_MTBF_S / self.nodes

    def failures(self, seed: int) -> Iterator[float]:
        """Yield the times of failures in seconds from the start.

        They do not depend on the saves.
        """
        random, at = Random(f"failures {seed} {self.number}"), 0.0
        while True:
            at += random.expovariate(1 / self.mtbf_s)
            yield at


@dataclass
class Save:
    """One checkpoint of a job: one request from each node."""

    job: Job
    asked_s: float
    #: Time since when work is not saved yet.
    since_s: float
    waiting: int  # number of nodes without a slot
    writing: int = 0
    cancelled: bool = False


#: Boost for each doubling of the cost per byte, the usual cost per byte, and the largest boost in
#: either direction. The values are from libioshape/slots/identity.c.
DOUBLE_S = 60.0
USUAL_COST = 3e-11
MOST_BOOST_S = 300.0
RANKS_PER_NODE = 8


def boost_s(save: Save) -> float:
    """Return the boost of a save in the background for what its waiting costs."""
    # A failure loses the work of all nodes since the last save.
    at_risk = save.job.nodes * (save.asked_s - save.since_s) / NODE_MTBF_S
    cost = at_risk * RANKS_PER_NODE / save.job.node_bytes
    boost = DOUBLE_S * math.log2(max(cost / USUAL_COST, 1e-30))
    return max(min(boost, MOST_BOOST_S), -MOST_BOOST_S)


def sizes(count: int, nodes: int, random: Random) -> list[int]:
    """Draw `count` sizes with about `nodes` nodes in all from a truncated Pareto distribution."""
    drawn = [(1 - random.random()) ** (-1 / TAIL) for _ in range(count)]
    low, high = 0.0, float(nodes)
    for _ in range(60):  # find the scale at which the jobs fill the cluster
        scale = (low + high) / 2
        found = [round(min(max(size * scale, SMALLEST), LARGEST)) for size in drawn]
        low, high = (scale, high) if sum(found) < nodes else (low, scale)
    return found


def scattered(random: Random) -> float:
    return float(SCATTER ** random.gauss(0, 1))


def jobs(count: int, nodes: int, bandwidth: float, seed: int) -> list[Job]:
    """Return jobs whose save intervals are the optimum of Young and Daly.

    `bandwidth` is that of the storage. For the optimum each job counts as alone on it.
    """
    random = Random(f"jobs {seed}")
    found = []
    for number, size in enumerate(sizes(count, nodes, random)):
        node_bytes = NODE_BYTES * (max(size, SMALLEST) / SMALLEST) ** -SHRINKS * scattered(random)
        job = Job(number, size, node_bytes, 0.0)
        best = math.sqrt(2 * job.bytes / bandwidth * job.mtbf_s) * scattered(random)
        interval = min(max(best, SHORTEST_S), LONGEST_S)
        found.append(replace(job, interval_s=interval, phase_s=random.random() * interval))
    return found
