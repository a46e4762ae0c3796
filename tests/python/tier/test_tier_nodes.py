# SPDX-License-Identifier: Apache-2.0
"""Groups of several nodes over tiers: each saves its own files, and parity restores lost ones."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ioshape
import object_store
import pytest
from command import call, fail
from ioshape._remote.listing import LISTING
from nodes import Networks, NotPermitted, networks, run_ranks
from processes import TIMEOUT_S, environment
from tiers import canonical, undrained, undrained_all

BEGIN = "from group_program import *\nimport warnings\nset_up_distributed()\n"

SAVE = (
    BEGIN
    + """
directory, size, *steps = arguments
for step in map(int, steps):
    report = ioshape.save_group(object_of(rank, step, int(size)), directory, step)
    say("saved", step=step, tier=report.tier, mode=report.mode,
        steps=[[one.code, one] for one in report.downgrades])
torch.distributed.barrier()
"""
)

LOAD = (
    BEGIN
    + """
directory, size, fallback = arguments
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = ioshape.load_group(directory, fallback=fallback == "fallback")
say("loaded", step=found["step"], right=is_right(found, rank, found["step"], int(size)),
    passed=[over.path for one in caught if one.category is ioshape.FallbackWarning
            for over in one.message.passed_over])
torch.distributed.barrier()
"""
)


class Nodes:
    """Nodes with a tier each, and the job whose ranks save there."""

    def __init__(
        self, folder: Path, nodes: int, per_node: int, network: Networks | None = None
    ) -> None:
        self.folder, self.nodes, self.per_node = folder, nodes, per_node
        self.network = network
        self.runs = folder / "slow" / "runs"
        self.runs.parent.mkdir()
        self.tiers = [folder / f"fast-{node}" for node in range(nodes)]
        for tier in self.tiers:
            tier.mkdir()

    def run(self, source: str, *arguments: object, **variables: str) -> list[list[dict[str, Any]]]:
        """Run a program on all ranks, each with the tier of its node."""
        each = {
            rank: {"IOSHAPE_TIER": str(self.tiers[rank // self.per_node])}
            for rank in range(self.nodes * self.per_node)
        }
        return run_ranks(
            self.folder,
            source,
            self.runs,
            *arguments,
            ranks=self.nodes * self.per_node,
            nodes=self.nodes,
            network=self.network,
            each=each,
            **{"LEAVE_UNDRAINED": "1", "OMP_NUM_THREADS": "1", **variables},
        )

    def place(self, node: int, step: int) -> Path:
        """Return the path of a checkpoint on the tier of a node."""
        return canonical(self.tiers[node], self.runs / f"step-{step:010}")

    def lose(self, *nodes: int) -> None:
        """Replace nodes by others whose tiers are empty."""
        for node in nodes:
            shutil.rmtree(self.tiers[node])
            self.tiers[node].mkdir()

    def undrained(self) -> AbstractContextManager[None]:
        """Keep all tiers undrained during the block."""
        return undrained_all(self.tiers)


def told(said: list[list[dict[str, Any]]], event: str) -> list[dict[str, Any]]:
    return [line for lines in said for line in lines if line["event"] == event]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "per_node", "parity", "lost"),
    [
        (2, 2, "1/2", (1,)),
        (4, 1, "1/4", (0,)),
        pytest.param(4, 2, "1/2", (0, 3), marks=pytest.mark.long),
        (6, 1, "2/6", (0, 4)),
        pytest.param(5, 1, "2/4", (1, 2), marks=pytest.mark.long),
    ],
)
def test_what_lost_nodes_had_is_restored_from_the_others_alone(
    nodes: int, per_node: int, parity: str, lost: tuple[int, ...], tmp_path: Path
) -> None:
    job = Nodes(tmp_path, nodes, per_node)
    size = 300_000
    with job.undrained():
        said = told(job.run(SAVE, size, 1, IOSHAPE_PARITY=parity), "saved")
        assert [(line["tier"] != "", line["steps"]) for line in said] == [(True, [])] * len(said)
    assert not job.runs.exists() or not any(job.runs.iterdir())
    job.lose(*lost)
    with job.undrained():
        said = told(job.run(LOAD, size, "", IOSHAPE_PARITY=parity), "loaded")
        assert [(line["step"], line["right"]) for line in said] == [(1, True)] * (nodes * per_node)
        assert not any(job.runs.glob("step-*"))
        # The restored nodes protect each other again, so another node may be lost.
        job.lose(next(node for node in range(nodes) if node not in lost))
        said = told(job.run(LOAD, size, "fallback", IOSHAPE_PARITY=parity), "loaded")
        assert [(line["step"], line["right"]) for line in said] == [(1, True)] * (nodes * per_node)


def drain(job: Nodes, *nodes: int) -> list[str]:
    """Drain these nodes' tiers one after the other, and return what became of each checkpoint."""
    found = []
    for node in nodes:
        done = command(job.tiers[node], "drain", str(job.tiers[node]), "--json")
        found += [one["result"] for one in json.loads(done)]
    return found


def command(tier: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ioshape", *arguments],
        env=environment(IOSHAPE_TIER=str(tier)),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.slow
def test_the_ranks_themselves_drain_and_keep_the_newest(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 2, 2)
    said = job.run(
        BEGIN
        + """
for step in (1, 2, 3):
    report = ioshape.save_group(object_of(rank, step), arguments[0], step, keep_last=2,
                                durable="destination")
    say("saved", tier=report.tier, there=[one.step for one in ioshape.checkpoints(arguments[0])])
torch.distributed.barrier()
""",
        LEAVE_UNDRAINED="",
    )
    there = [line["there"] for line in told(said, "saved")]
    assert all(step in steps for steps, step in zip(there, [1, 2, 3] * 4, strict=True))
    assert [one.step for one in ioshape.checkpoints(job.runs)] == [2, 3]


@pytest.mark.slow
def test_what_others_will_never_bring_is_given_up_for_a_newer_checkpoint(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 2, 1)
    with job.undrained():
        job.run(SAVE, 20_000, 1)
    job.lose(1)
    assert drain(job, 0) == ["waits"]
    assert [path.name.split(".")[1] for path in job.runs.iterdir()] == [f"drained-step-{1:010}"]
    job.run(SAVE, 20_000, 2, LEAVE_UNDRAINED="")
    assert drain(job, 1, 0) == ["waits"]
    two_days_ago = time.time() - 2 * 86400
    os.utime(job.place(0, 1), (two_days_ago, two_days_ago))
    assert drain(job, 0) == ["newer"]
    assert {path.name for path in job.runs.iterdir()} == {f"step-{2:010}"}


SAVE_ALIKE = (
    BEGIN
    + """
directory = arguments[0]
report = ioshape.save_group(object_of(0, 1, 1 << 20), directory, 1)
say("saved", repeated=report.repeated_bytes)
found = ioshape.load_group(directory)
say("loaded", right=is_right(found, 0, 1, 1 << 20))
torch.distributed.barrier()
"""
)


@pytest.mark.slow
def test_of_equal_parts_each_node_keeps_one_on_its_own_tier(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 2, 2)
    with job.undrained():
        said = job.run(SAVE_ALIKE)
    assert [line["right"] for line in told(said, "loaded")] == [True] * 4
    assert [line["repeated"] >> 20 for line in told(said, "saved")] == [2] * 4
    for node in range(2):
        assert (job.place(node, 1) / f"node-0000{node}.zip").stat().st_size >> 20 == 1
    drain(job, 0, 1)
    checkpoint = ioshape.latest(job.runs)
    assert checkpoint is not None
    assert (checkpoint.ranks, checkpoint.distinct, checkpoint.files) == (4, 1, 2)
    checkpoint.verify()
    assert ioshape.load_group(job.runs)["step"] == 1


@pytest.mark.slow
def test_ranks_that_have_moved_take_their_parts_along(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 3, 1)
    with job.undrained():
        job.run(SAVE, 300_000, 1, IOSHAPE_PARITY="1/2")
        job.tiers = [job.tiers[2], job.tiers[0], job.tiers[1]]
        said = told(job.run(LOAD, 300_000, "", IOSHAPE_PARITY="1/2"), "loaded")
    assert [(line["step"], line["right"]) for line in said] == [(1, True)] * 3
    assert not any(job.runs.glob("step-*"))


@pytest.mark.slow
def test_ranks_of_one_node_may_go_on_on_several(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 2, 1)
    both, job.nodes = job.tiers, 1
    job.per_node = 2
    with undrained(both[0]):
        job.run(SAVE, 20_000, 1)
        job.nodes, job.per_node = 2, 1
        with undrained(both[1]):
            said = told(job.run(LOAD, 20_000, ""), "loaded")
    assert {(line["step"], line["right"]) for line in said} == {(1, True)}
    assert drain(job, 1, 0)[0] == "drained"
    assert drain(job, 0, 1) == []
    (found,) = ioshape.checkpoints(job.runs)
    found.verify()


@pytest.mark.slow
def test_what_one_node_shows_of_a_checkpoint_of_several(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 2, 1)
    with job.undrained():
        job.run(SAVE, 20_000, 1)
        (seen,) = ioshape.checkpoints(job.runs, tier=job.tiers[1])
        assert (seen.step, seen.ranks) == (1, 2)
        assert seen.load(1)["rank"] == 1
        for call in (lambda: seen.load(0), seen.verify):
            with pytest.raises(ioshape.StorageError) as caught:
                call()
            assert caught.value.errno == errno.ENOENT
            assert "another node" in str(caught.value)


@pytest.mark.long
def test_a_checkpoint_of_several_nodes_is_uploaded_when_all_of_it_is_there(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 2, 1)
    with job.undrained():
        job.run(SAVE, 20_000, 1, IOSHAPE_PARITY="1/2")
    with object_store.moto(tmp_path) as store:
        url = f"s3://{object_store.BUCKET}/run"

        def upload(node: int) -> list[str]:
            command = ["drain", str(job.tiers[node]), "--to", url, "--json"]
            done = call(*command, env=store.variables)
            assert done.returncode == 0, done.stderr
            return [one["result"] for one in json.loads(done.stdout)]

        assert upload(0) == ["waits"]
        assert store.objects() == []
        part = canonical(job.tiers[0], job.runs) / "step-0000000001"
        refused = call("upload", part, f"{url}/", env=store.variables)
        assert "is on the tier of another node" in fail(refused)
        assert upload(1) == ["drained", "uploaded"]
        there = {f"run{path}" for path in job.runs.glob("*/*")}
        assert {one for one in store.objects() if LISTING not in one} == there
        # The other node finds that all files are at the destination already.
        assert upload(0) == ["drained"]
        assert upload(1) == []


@pytest.mark.long
def test_nodes_may_drain_at_the_same_time_what_replaces_a_checkpoint(tmp_path: Path) -> None:
    job = Nodes(tmp_path, 3, 1)
    for size in (20_000, 30_000, 40_000):
        with job.undrained():
            job.run(SAVE, size, 1)
        drains = [
            subprocess.Popen(
                [sys.executable, "-m", "ioshape", "drain", str(tier)],
                env=environment(IOSHAPE_TIER=str(tier)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for tier in job.tiers
        ]
        for one in drains:
            output, _ = one.communicate(timeout=TIMEOUT_S)
            assert one.returncode == 0, output
        # Drains that ran before the last one may have left entries. Drain again.
        drain(job, 0, 1, 2)
        assert drain(job, 0, 1, 2) == []
        assert {path.name for path in job.runs.iterdir()} == {f"step-{1:010}"}
        (found,) = ioshape.checkpoints(job.runs)
        found.verify()
        assert all(len(found.load(rank)["data"]) == size for rank in range(3))


@pytest.mark.slow
def test_nodes_of_a_network_restore_what_is_lost(tmp_path: Path) -> None:
    """Check that nodes with addresses of their own restore a lost node over a switch."""
    try:
        with networks(3) as network:
            job = Nodes(tmp_path, 3, 1, network)
            with job.undrained():
                job.run(SAVE, 3_000_000, 1, IOSHAPE_PARITY="1/4")
                job.lose(1)
                said = told(job.run(LOAD, 3_000_000, "fallback", IOSHAPE_PARITY="1/4"), "loaded")
    except NotPermitted as why:
        pytest.skip(str(why))
    assert [(line["step"], line["right"], line["passed"]) for line in said] == [(1, True, [])] * 3
