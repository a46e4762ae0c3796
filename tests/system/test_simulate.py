# SPDX-License-Identifier: Apache-2.0
"""Test the simulator of a cluster: its invariants, and that its parts agree."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from slots_script import Server
from striped import striped

from tests.simulate.cluster import Cluster
from tests.simulate.order import ORDERS, Queue
from tests.simulate.report import AT_ONCE, Case, compare, found_in, jain, queue_of
from tests.simulate.script import Modelled, Real, Rules, Scripted
from tests.simulate.storage import HDD, MIB, Storage
from tests.simulate.workload import Job, jobs

COUNT, NODES = 30, 3000
STORAGE = replace(HDD, bandwidth=3e10)
HOUR_S = 3600.0


def cluster(
    queue: Queue | None, *, seed: int = 1, storage: Storage = STORAGE, background: bool = True
) -> Cluster:
    work = jobs(COUNT, NODES, STORAGE.bandwidth, seed, 0.3)
    return Cluster(work, storage, queue, background=background, seed=seed)


def queues() -> Iterator[Queue | None]:
    for order in (AT_ONCE, *ORDERS):
        yield queue_of(order, STORAGE, 8)


def test_jobs_fill_the_cluster() -> None:
    for seed in range(5):
        work = jobs(200, 100_000, 1e12, seed)
        assert sum(job.nodes for job in work) == pytest.approx(100_000, rel=0.01)
        assert min(job.nodes for job in work) >= 8
        # Few jobs have most nodes.
        largest = sorted((job.nodes for job in work), reverse=True)[:20]
        assert sum(largest) > 50_000


@pytest.mark.parametrize("background", [True, False])
def test_invariants(background: bool) -> None:
    storage = replace(STORAGE, bandwidth=1e10)  # less than the jobs request
    for queue in queues():
        tried = cluster(queue, storage=storage, background=background)
        tried.start()
        tried.run(4 * HOUR_S)
        counts = tried.counts
        assert counts.failures > 0
        assert counts.cancelled > 0 or not background
        assert counts.finished > 500
        saving = [state.saving for state in tried.states if state.saving]
        assert tried.waiting == sum(save.waiting for save in saving)
        under_way = tried.writing + tried.waiting
        assert counts.asked == counts.finished + counts.cancelled + under_way
        if queue:
            assert counts.most_writing <= tried.capacity
            # No more was written than is possible in that time.
            assert counts.bytes <= storage.bandwidth * 4 * HOUR_S * storage.alone * 1.001
        for state in tried.states:
            lost = state.lost
            assert min(lost.saving, lost.late, lost.again, lost.restart) >= 0
            assert lost.saving + lost.late + lost.restart <= 4 * HOUR_S + 300


def test_a_storm_ends_and_writes_every_byte() -> None:
    for queue in queues():
        tried = cluster(queue, background=False)
        tried.start_storm()
        tried.run(100 * HOUR_S)
        assert all(len(state.takes_s) == 1 for state in tried.states)
        needed = sum(state.job.bytes for state in tried.states)
        assert tried.counts.bytes == pytest.approx(needed)
        least = needed / STORAGE.bandwidth
        assert max(state.takes_s[0] for state in tried.states) >= least


def test_the_same_seed_is_the_same_cluster() -> None:
    def found(seed: int) -> list[tuple[float, int, int]]:
        tried = cluster(queue_of("fair", STORAGE, 1), seed=seed)
        tried.start()
        tried.run(HOUR_S)
        return tried.grants

    assert found(1) == found(1)
    assert found(1) != found(2)


def test_alone_on_the_storage_nothing_waits() -> None:
    job = Job(0, 4, 1e9, 600.0)
    writer_s = 1e9 / (HDD.writer_bandwidth * HDD.alone) + HDD.overhead_s
    for queue in (None, queue_of("ours", STORAGE, 1)):
        tried = Cluster([job], STORAGE, queue, background=True)
        tried.start()
        tried.run(1000)
        assert tried.states[0].takes_s == pytest.approx([writer_s], rel=0.05)
        assert tried.states[0].lost.saving == pytest.approx(job.stage_s)


def test_efficiency_falls_where_files_share_targets() -> None:
    writers = HDD.writers
    assert HDD.efficiency(1) == HDD.efficiency(writers) == HDD.alone
    assert HDD.efficiency(2 * writers) == HDD.efficiency(100 * writers) == HDD.crowded
    rates = [HDD.rate(n) * n for n in (1, writers // 2, writers)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(HDD.bandwidth * HDD.alone, rel=0.01)


def test_jain() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)


def test_more_load_loses_more_and_the_order_matters() -> None:
    case = Case("small", STORAGE, count=COUNT, nodes=NODES, hours=0.5, seeds=(1, 2), stretch=0.1)
    slow = compare(replace(case, storage=replace(STORAGE, bandwidth=4e10)))
    quick = compare(replace(case, storage=replace(STORAGE, bandwidth=4e11)))
    assert slow.io[AT_ONCE] > 3 * quick.io[AT_ONCE]
    assert slow.ratio(AT_ONCE, "ours") > 1


# ---- The real script, its model, and the order that approximates both ---------------------------


def simulated(rules: Rules, fail_over: bool) -> Cluster:
    storage = replace(HDD, bandwidth=5e9)
    queue = Scripted(rules, storage.writers)
    work = [Job(n, 5 + 7 * n, 1e9 * (1 + n % 3), 200.0 + 30 * n, 37.0 * n) for n in range(6)]
    tried = Cluster(work, storage, queue, background=True)
    tried.start()
    tried.run(150)
    for lose_all in (False, True):
        if fail_over:
            queue.fail_over(lose_all=lose_all)
        tried.run(tried.now + 150)
    tried.run(tried.now + 200)
    return tried


@pytest.mark.parametrize("fail_over", [False, True])
def test_the_script_is_its_model(fail_over: bool, tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        real = simulated(Real(server), fail_over)
    modelled = simulated(Modelled(), fail_over)
    assert len(real.grants) > 20
    assert real.grants == modelled.grants
    assert real.counts == modelled.counts
    # After a loss, holders that reclaim their slots write beside new ones.
    assert real.counts.most_writing <= real.capacity * (2 if fail_over else 1)
    assert all(state.takes_s for state in real.states)


def test_an_order_stands_for_that_of_the_script() -> None:
    storage = replace(HDD, bandwidth=2e10)
    work = jobs(20, 1500, storage.bandwidth, 3, 0.05)
    stands = Cluster(work, storage, queue_of("ours", storage, 1), background=True)
    stands.start()
    stands.run(400)
    with TemporaryDirectory() as folder, Server(Path(folder)) as server:
        queue = Scripted(Real(server), storage.writers)
        real = Cluster(work, storage, queue, background=True)
        real.start()
        real.run(400)
    assert real.counts.granted > 500
    assert stands.counts.finished == pytest.approx(real.counts.finished, rel=0.03)
    mean, exact = (found_in(one, 400).mean_save_s for one in (stands, real))
    assert mean == pytest.approx(exact, rel=0.1)


# ---- The storage model and stripefs -------------------------------------------------------------


def write(path: Path, mib: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(mib):
            file.write(bytes(MIB))


@pytest.mark.slow
def test_targets_seek_as_those_of_stripefs() -> None:
    """Compare counted seeks and bytes rather than times."""
    for files, mib, expected in ((1, 256, 1.0), (16, 32, HDD.crowded)):
        with (
            striped(
                "hdd",
                targets=8,
                stripe_size="1Mi",
                stripe_count=-1,
                run="16Mi",
                bandwidth="60M",
                seek_ms=8,
                cache="client",
            ) as mount,
            ThreadPoolExecutor(files) as pool,
        ):
            list(pool.map(write, [mount.path / f"f{n}" for n in range(files)], [mib] * files))
            targets = mount.statistics()["targets"]
        written = sum(target["bytes_written"] for target in targets) / HDD.target_bandwidth
        sought = sum(target["seeks"] for target in targets) * HDD.seek_s
        assert written / (written + sought) == pytest.approx(expected, abs=0.1)
