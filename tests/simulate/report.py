# SPDX-License-Identifier: Apache-2.0
"""Run simulations and return their results as numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from .cluster import Cluster
from .order import ORDERS, Fair
from .storage import INSTANT, Storage
from .workload import Job, jobs

#: Number of requests in a turn while jobs compete. Turns of one request would take far longer to
#: simulate, and change the result by a few percent.
QUANTUM = 64
#: Name of the order without a queue: all jobs write at once.
AT_ONCE = "at once"


def queue_of(order: str, storage: Storage, quantum: int = QUANTUM) -> Fair | None:
    """Return a queue for this order, or None for AT_ONCE."""
    if order == AT_ONCE:
        return None
    return Fair(ORDERS[order], quantum, storage.rate(storage.writers) * storage.writers)


@dataclass(frozen=True)
class Found:
    """Results of one simulation. Shares are of the time in which all nodes could have trained."""

    lost: float  # to saves and failures, without restarts
    saving: float
    late: float
    again: float
    mean_save_s: float  # mean over jobs, from the request until durable
    longest_save_s: float
    jain: float  # fairness of the factors by which jobs' saves take longer than alone
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
    """Return Jain's index of fairness, which is 1 if all values are equal."""
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
    """Simulate this many hours."""
    cluster = Cluster(work, storage, queue_of(order, storage), background=background, seed=seed)
    cluster.start()
    cluster.run(hours * 3600)
    return found_in(cluster, hours * 3600)


def storm(work: list[Job], storage: Storage, order: str) -> tuple[float, float]:
    """Let all jobs save at once. Return when the last job is done, and the mean over all nodes."""
    cluster = Cluster(work, storage, queue_of(order, storage))
    cluster.start_storm()
    cluster.run(1e9)
    done = [(state.takes_s[0], state.job.nodes) for state in cluster.states]
    return max(took for took, _ in done), sum(took * n for took, n in done) / sum(
        n for _, n in done
    )


@dataclass(frozen=True)
class Case:
    """The varied parameters. Others are in workload.py and storage.py."""

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
    load: float  # requested fraction of the storage's bandwidth
    io: dict[str, float]  # by order: the fraction of time that is lost because storage is slow
    found: dict[str, Found]  # results of the first seed

    def ratio(self, order: str, to: str) -> float:
        return self.io[order] / self.io[to]


def compare(case: Case) -> Compared:
    """Simulate a case in all orders."""
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

        # With infinitely fast storage some time is still lost. No order can save that.
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
