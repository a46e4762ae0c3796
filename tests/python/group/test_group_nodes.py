# SPDX-License-Identifier: Apache-2.0
"""Groups over several nodes: each is a network namespace, and a switch connects them."""

import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from coordinators import running_redis
from nodes import Networks, NotPermitted, networks, run_ranks, run_torchrun, started_ranks

BEGIN = "from group_program import *\n"


@pytest.fixture(scope="module")
def network() -> Iterator[Networks]:
    try:
        with networks(3) as made:
            yield made
    except NotPermitted as reason:
        pytest.skip(str(reason))


TRAINING = (
    BEGIN
    + """
set_up_distributed()
directory = arguments[0]
for step, mode in enumerate(("auto", "each", "node", "rank0"), start=1):
    report = ioshape.save_group(object_of(rank, step, 3_000_000), directory, step, mode=mode)
    # A collective of the training between saves, and while one is under way.
    torch.distributed.barrier()
    say("saved", layout=report.mode, why=report.why)
handle = ioshape.save_group_async(object_of(rank, 9, 9_000_000), directory, 9, mode="rank0")
total = torch.ones(1)
for _ in range(20):
    torch.distributed.all_reduce(total)
    total /= ranks
handle.wait()
found = ioshape.load_group(directory)
job = ioshape.job()
say("loaded", right=is_right(found, rank, 9, 9_000_000), sum=float(total),
    local=job.local_world_size, node=rank // job.local_world_size)
torch.distributed.destroy_process_group()
"""
)


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.slow
def test_training_on_two_nodes(tmp_path: Path, network: Networks, *, by_torchrun: bool) -> None:
    folder = tmp_path / "run"
    if by_torchrun:
        lines = run_torchrun(tmp_path, TRAINING, folder, network=network, nodes=2, ranks_per_node=2)
    else:
        said = run_ranks(tmp_path, TRAINING, folder, network=network, ranks=4, nodes=2)
        lines = list(chain.from_iterable(said))
    loaded = [line for line in lines if line["event"] == "loaded"]
    assert sorted(line["rank"] for line in loaded) == [0, 1, 2, 3]
    assert all(line["right"] and line["local"] == 2 and line["sum"] == 1.0 for line in loaded)
    saved = [line["layout"] for line in lines if line["event"] == "saved" and not line["rank"]]
    assert saved[1:] == ["each", "node", "rank0"]
    assert len(set(saved[:1])) == 1
    files = {
        step: sorted(path.name for path in (folder / f"step-{step:010d}").iterdir())
        for step in (2, 3, 4)
    }
    assert len(files[2]) == 5
    assert files[3] == ["manifest.json", "node-00000.zip", "node-00001.zip"]
    assert files[4] == ["manifest.json", "ranks.zip"]
    with zipfile.ZipFile(folder / "step-0000000009" / "ranks.zip") as archive:
        assert archive.testzip() is None
        assert [name for name in archive.namelist() if name.startswith("rank-")] == [
            f"rank-0000{rank}.pt" for rank in range(4)
        ]


STEPS = (
    BEGIN
    + """
mode = arguments[1]
if mode == "rank0":
    set_up_distributed()
for step in range(1, 10_000):
    try:
        ioshape.save_group(object_of(rank, step, 2_000_000), arguments[0], step, mode=mode,
                           keep_last=2)
    except Exception as error:
        say("failed", failed=error.rank, cause=str(error.__cause__))
        break
    say("saved", step=step)
os._exit(0)
"""
)

AFTERWARDS = (
    BEGIN
    + """
found = ioshape.load_group(arguments[0])
say("loaded", step=found["step"], right=is_right(found, rank, found["step"], 2_000_000))
ioshape.save_group(object_of(rank, 20_000), arguments[0], 20_000)
say("entries", names=sorted(os.listdir(arguments[0])))
"""
)


def check_what_stands(folder: Path, network: Networks, saved: int) -> None:
    """Check that all ranks load one checkpoint, bit by bit.

    The next save must remove the attempts of dead jobs.
    """
    with started_ranks(
        *(folder, AFTERWARDS, folder / "run"), ranks=6, nodes=3, network=network
    ) as job:
        said = job.end()
    assert [lines[0]["right"] for lines in said] == [True] * 6
    assert {lines[0]["step"] for lines in said} in ({saved}, {saved + 1})
    assert not [name for name in said[0][1]["names"] if name.startswith(".step")]


def judge(folder: Path, network: Networks, said: list[list[dict[str, Any]]], *lost: int) -> None:
    """Check that every surviving rank has failed and blames one of the `lost` ranks."""
    survivors = [lines for lines in said if lines[-1]["event"] == "failed"]
    assert len(survivors) >= len(said) - 1
    for lines in survivors:
        assert lines[-1]["failed"] in lost, lines[-1]
    saved = max(line["step"] for lines in said for line in lines if line["event"] == "saved")
    check_what_stands(folder, network, saved)


@pytest.mark.parametrize(
    "mode", ["node", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("each", "rank0"))]
)
@pytest.mark.slow
def test_a_rank_of_another_node_is_killed(tmp_path: Path, network: Networks, mode: str) -> None:
    with (
        running_redis() as redis,
        started_ranks(
            *(tmp_path, STEPS, tmp_path / "run", mode),
            ranks=6,
            nodes=3,
            network=network,
            IOSHAPE_DEADLINE_MS="2500",
            IOSHAPE_COORDINATOR=redis.address,
        ) as job,
    ):
        job.await_all("saved")
        job.members[3].process.kill()
        said = job.end(3)
    judge(tmp_path, network, said, 3)


@pytest.mark.slow
def test_a_node_whose_cable_is_cut(tmp_path: Path, network: Networks) -> None:
    """Check a lost connection: messages still arrive as files, but bytes between nodes do not."""
    with started_ranks(
        *(tmp_path, STEPS, tmp_path / "run", "rank0"),
        ranks=6,
        nodes=3,
        network=network,
        IOSHAPE_DEADLINE_MS="2500",
        IOSHAPE_TEST_STORE="files",
    ) as job:
        job.await_all("saved")
        network.cut(1)
        try:
            said = job.end()
        finally:
            network.reconnect(1)
    # The ranks of the disconnected node blame rank 0, which they cannot reach, or their leader,
    # rank 2.
    for lines in (said[2], said[3]):
        assert lines[-1]["failed"] in (0, 2), lines[-1]
    judge(tmp_path, network, [*said[:2], *said[4:]], 2, 3)
    # The error contains the message of torch, too.
    assert "torch.distributed" in said[0][-1]["cause"], said[0][-1]


@pytest.mark.slow
def test_a_full_disk_on_one_node(tmp_path: Path, network: Networks) -> None:
    """Check a full disk, simulated by RLIMIT_FSIZE on both ranks of node 1."""
    program = (
        BEGIN
        + """
import resource
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
ioshape.save_group(object_of(rank, 1, 2_000_000), arguments[0], 1, mode="node")
if rank in (2, 3):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
try:
    ioshape.save_group(object_of(rank, 2, 2_000_000), arguments[0], 2, mode="node")
except OSError as error:
    say("failed", failed=error.rank, errno=error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
found = ioshape.load_group(arguments[0])
say("loaded", right=is_right(found, rank, 1, 2_000_000))
"""
    )
    with started_ranks(
        *(tmp_path, program, tmp_path / "run"), ranks=6, nodes=3, network=network
    ) as job:
        said = job.end()
    for lines in said:
        assert [line["event"] for line in lines] == ["failed", "loaded"], lines
        assert lines[1]["right"]
        assert lines[0]["rank"] == 2 or lines[0]["failed"] == 2, lines[0]
    assert said[2][0]["errno"] == 27  # EFBIG
