# SPDX-License-Identifier: Apache-2.0
"""What a simulation found, as numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from .cluster import Cluster
from .order import ORDERS, Fair
from .storage import INSTANT, Storage
from .workload import Job, jobs

#: turns of so many requests each, where jobs compete: turns of one would take far longer, and come
#: to the same within a few percent
QUANTUM = 64
#: in no order: all write at once
AT_ONCE = "at once"


def queue_of(order: str, storage: Storage, quantum: int = QUANTUM) -> Fair | None:
    """Return a queue in this order."""
    if order == AT_ONCE:
        return None
    return Fair(ORDERS[order], quantum, storage.rate(storage.writers) * storage.writers)


@dataclass(frozen=True)
class Found:
    """Shares are of the time of all nodes, in which they could have trained."""

    lost: float  # to saves and to failures, without restarts
    saving: float
    late: float
    again: float
    mean_save_s: float  # mean over jobs, from asking until durable
    longest_save_s: float
    jain: float  # of how many times longer than alone each job's saves take
    saves: int


def slowdowns(cluster: Cluster) -> list[float]:
    found = []
    for state in cluster.states:
        if state.takes_s:
            storage, job = cluster.storage, state.job
            waves = -(-job.nodes // storage.writers)
            alone = job.node_bytes / storage.rate(min(job.nodes, storage.writers)) * waves
            found.append(fmean(state.takes_s) / (alone + storage.overhead_s))
    return found


def jain(values: Sequence[float]) -> float:
    """1: all the same."""
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def found_in(cluster: Cluster, seconds: float) -> Found:
    nodes = sum(state.job.nodes for state in cluster.states)

    def share(name: str) -> float:
        lost: Iterator[float] = (getattr(one.lost, name) * one.job.nodes for one in cluster.states)
        return sum(lost) / (nodes * seconds)

    takes = [state.takes_s for state in cluster.states if state.takes_s]
    parts = {name: share(name) for name in ("saving", "late", "again")}
    return Found(
        lost=sum(parts.values()),
        **parts,
        mean_save_s=fmean(map(fmean, takes)) if takes else 0.0,
        longest_save_s=max(map(max, takes), default=0.0),
        jain=jain(slowdowns(cluster)),
        saves=sum(map(len, takes)),
    )


def run(
    work: list[Job], storage: Storage, order: str, *, hours: float, background: bool, seed: int
) -> Found:
    """Until so many hours have passed."""
    cluster = Cluster(work, storage, queue_of(order, storage), background=background, seed=seed)
    cluster.start()
    cluster.run(hours * 3600)
    return found_in(cluster, hours * 3600)


def storm(work: list[Job], storage: Storage, order: str) -> tuple[float, float]:
    """All jobs save at the same moment: when the last one is done, and the mean of all nodes."""
    cluster = Cluster(work, storage, queue_of(order, storage))
    cluster.start_storm()
    cluster.run(1e9)
    done = [(state.takes_s[0], state.job.nodes) for state in cluster.states]
    return max(took for took, _ in done), sum(took * n for took, n in done) / sum(
        n for _, n in done
    )


@dataclass(frozen=True)
class Case:
    """What is varied; the rest is as in workload.py and storage.py."""

    name: str
    storage: Storage
    background: bool = True
    stretch: float = 1.0
    count: int = 200
    nodes: int = 100_000
    hours: float = 2.0
    seeds: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True)
class Compared:
    """Medians over the seeds."""

    case: Case
    load: float  # asked for, of the storage's bandwidth
    io: dict[str, float]  # by order: the share of the time that is lost because storage is slow
    found: dict[str, Found]  # of the first seed

    def ratio(self, order: str, to: str) -> float:
        return self.io[order] / self.io[to]


def compare(case: Case) -> Compared:
    """In all orders."""
    io: dict[str, list[float]] = {name: [] for name in (AT_ONCE, *ORDERS)}
    first: dict[str, Found] = {}
    loads = []
    for seed in case.seeds:
        work = jobs(case.count, case.nodes, case.storage.bandwidth, seed, case.stretch)
        loads.append(sum(job.bytes / job.interval_s for job in work) / case.storage.bandwidth)

        def lost(order: str, storage: Storage, work: list[Job] = work, seed: int = seed) -> Found:
            return run(
                work, storage, order, hours=case.hours, background=case.background, seed=seed
            )

        # What remains of that with a storage that takes no time, no order can save.
        least = lost(AT_ONCE, INSTANT).lost
        for order, values in io.items():
            found = lost(order, case.storage)
            first.setdefault(order, found)
            values.append(found.lost - least)
    return Compared(
        case, median(loads), {name: median(values) for name, values in io.items()}, first
    )


def as_json(compared: Compared) -> dict[str, object]:
    return {
        "case": asdict(compared.case),
        "load": compared.load,
        "lost_to_io": compared.io,
        "found": {order: asdict(found) for order, found in compared.found.items()},
    }
