# SPDX-License-Identifier: Apache-2.0
"""Test the simulator of a cluster: its invariants, and that the script decides as its model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slots_script import Server

from tests.simulate.cluster import Cluster
from tests.simulate.fairness import jain
from tests.simulate.script import Modelled, Real, Rules, Scripted
from tests.simulate.storage import HDD
from tests.simulate.workload import Job, jobs

STORAGE = replace(HDD, bandwidth=5e9)


def modelled(work: list[Job], seed: int = 1) -> Cluster:
    return Cluster(work, STORAGE, Scripted(Modelled(), STORAGE.writers), seed)


def test_jobs_fill_the_cluster() -> None:
    for seed in range(5):
        work = jobs(200, 100_000, 1e12, seed)
        assert sum(job.nodes for job in work) == pytest.approx(100_000, rel=0.01)
        assert min(job.nodes for job in work) >= 8
        # Few jobs have most nodes.
        largest = sorted((job.nodes for job in work), reverse=True)[:20]
        assert sum(largest) > 50_000


def test_a_storm_ends_and_every_node_has_written() -> None:
    tried = modelled(jobs(10, 200, STORAGE.bandwidth, 1))
    tried.start_storm()
    tried.run(100 * 3600)
    assert all(len(state.takes_s) == 1 for state in tried.states)
    assert tried.counts.finished == sum(state.job.nodes for state in tried.states)
    needed = sum(state.job.bytes for state in tried.states)
    assert max(state.takes_s[0] for state in tried.states) >= needed / STORAGE.bandwidth


def test_the_same_seed_is_the_same_cluster() -> None:
    def grants(seed: int) -> list[tuple[float, int]]:
        tried = modelled(jobs(6, 100, STORAGE.bandwidth, seed), seed)
        tried.start()
        tried.run(600)
        return tried.grants

    assert grants(1) == grants(1)
    assert grants(1) != grants(2)


def test_alone_on_the_storage_nothing_waits() -> None:
    job = Job(0, 4, 1e9, 600.0)
    tried = modelled([job])
    tried.start()
    tried.run(1000)
    assert tried.states[0].takes_s == pytest.approx([STORAGE.write_s(1e9)], rel=0.05)


def test_jain() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)


# ---- The real script and its model --------------------------------------------------------------


def simulated(rules: Rules, fail_over: bool) -> Cluster:
    queue = Scripted(rules, STORAGE.writers)
    work = [Job(n, 5 + 7 * n, 1e9 * (1 + n % 3), 200.0 + 30 * n, 37.0 * n) for n in range(6)]
    tried = Cluster(work, STORAGE, queue)
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
    model = simulated(Modelled(), fail_over)
    assert len(real.grants) > 20
    assert real.grants == model.grants
    counts = real.counts
    assert counts == model.counts
    assert counts.asked == counts.finished + counts.cancelled + real.writing + real.waiting
    # After a loss, holders that reclaim their slots write beside new ones.
    assert counts.most_writing <= STORAGE.writers * (2 if fail_over else 1)
    assert all(state.takes_s for state in real.states)


def test_a_job_that_fails_gives_up_its_save() -> None:
    class Fails(Job):
        """A job that fails while its nodes wait and write."""

        def failures(self, seed: int) -> Iterator[float]:
            del seed
            yield from (201.0, 1e9)

    tried = modelled([Fails(0, 40, 1e9, 200.0)])
    tried.start()
    tried.run(850)
    counts = tried.counts
    assert counts.cancelled > 0
    assert counts.asked == counts.finished + counts.cancelled + tried.writing + tried.waiting
    assert len(tried.states[0].takes_s) == 1
