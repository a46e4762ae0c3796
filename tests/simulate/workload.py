# SPDX-License-Identifier: Apache-2.0
"""Jobs like those of published traces; docs/scale.md names the sources."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

GB = 1e9
DAY_S = 86_400.0

#: 419 failures of 2,048 nodes in 54 days (Llama 3)
NODE_MTBF_S = 54 * DAY_S * 2048 / 419
#: a node copies its tensors to memory of the host
STAGE_BYTES_S = 20 * GB
RESTART_S = 300.0

#: P(more nodes than n) falls with n to this power: few jobs have most nodes
TAIL = 0.6
SMALLEST, LARGEST = 8, 8192
#: of a job of the smallest size; the model grows more slowly than the number of nodes
NODE_BYTES, SHRINKS = 14 * GB, 0.3
#: scatter of what a node saves, and of intervals around the best: factors
SCATTER = 1.6
SHORTEST_S, LONGEST_S = 120.0, 4 * 3600.0


@dataclass(frozen=True)
class Job:
    """What runs for the whole time."""

    number: int
    nodes: int
    node_bytes: float
    interval_s: float  # of training between two saves
    #: its first save is due so much earlier
    phase_s: float = 0.0

    @property
    def bytes(self) -> float:
        return self.nodes * self.node_bytes

    @property
    def stage_s(self) -> float:
        """How long a save in the background holds training."""
        return self.node_bytes / STAGE_BYTES_S

    @property
    def mtbf_s(self) -> float:
        return NODE_MTBF_S / self.nodes

    def failures(self, seed: int) -> Iterator[float]:
        """When it fails, in seconds from the start. The same whatever its saves do."""
        random, at = Random(f"failures {seed} {self.number}"), 0.0
        while True:
            at += random.expovariate(1 / self.mtbf_s)
            yield at


def sizes(count: int, nodes: int, random: Random) -> list[int]:
    """As many as that, together about that many nodes: a Pareto distribution, cut at both ends."""
    drawn = [(1 - random.random()) ** (-1 / TAIL) for _ in range(count)]
    low, high = 0.0, float(nodes)
    for _ in range(60):  # the scale at which they fill the cluster
        scale = (low + high) / 2
        found = [round(min(max(size * scale, SMALLEST), LARGEST)) for size in drawn]
        low, high = (scale, high) if sum(found) < nodes else (low, scale)
    return found


def scattered(random: Random) -> float:
    return float(SCATTER ** random.gauss(0, 1))


def jobs(count: int, nodes: int, bandwidth: float, seed: int, stretch: float = 1.0) -> list[Job]:
    """`bandwidth` of the storage, from which each job takes the interval of Young and Daly as if
    it was alone there; `stretch` makes them all longer."""
    random = Random(f"jobs {seed}")
    found = []
    for number, size in enumerate(sizes(count, nodes, random)):
        node_bytes = NODE_BYTES * (max(size, SMALLEST) / SMALLEST) ** -SHRINKS * scattered(random)
        job = Job(number, size, node_bytes, 0.0)
        best = math.sqrt(2 * job.bytes / bandwidth * job.mtbf_s) * scattered(random) * stretch
        interval = min(max(best, SHORTEST_S), LONGEST_S)
        found.append(replace(job, interval_s=interval, phase_s=random.random() * interval))
    return found
