# SPDX-License-Identifier: Apache-2.0
"""job(): the rank and the job that each launcher's environment describes."""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import ioshape
import pytest
from checkpoints import left_clean, names_in, number_in
from ioshape._group.group import _token
from processes import run_interpreter, run_program

NODE = socket.gethostname()

# The documented variables of each launcher, for rank 5 of 8 on the second of two nodes.
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run-7",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node-1@1",
    "PMIX_RANK": "5",
}
MPICH = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "PMI_JOBID": "kvs_1",
}
PMI = {
    "PMIX_RANK": "5",
    "PMIX_SIZE": "8",
    "PMIX_LOCAL_RANK": "1",
    "PMIX_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "job-9",
}
LAUNCHERS = {
    "torchrun": (TORCHRUN, "run-7"),
    "slurm": (SLURM, "4711"),
    "openmpi": (OPENMPI, "prterun-node-1@1"),
    "mpich": (MPICH, "kvs_1"),
    "pmi": (PMI, "job-9"),
}

Launched = Callable[[dict[str, str]], ioshape.types.Job]


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Return a function that calls job() with the given launcher variables and no others."""

    def launch(variables: dict[str, str]) -> ioshape.types.Job:
        for name in list(os.environ):
            if re.match("RANK$|WORLD_|LOCAL_|SLURM_|OMPI_|PMI_|PMIX_|MPI_|TORCHELASTIC_", name):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return ioshape.job()

    return launch


ALONE = ioshape.types.Job(0, 1, 0, 1, NODE, "", "alone")


def test_a_process_by_itself(launched: Launched) -> None:
    assert launched({}) == ALONE


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_is_understood(launched: Launched, launcher: str) -> None:
    variables, job_id = LAUNCHERS[launcher]
    assert launched(variables) == ioshape.types.Job(5, 8, 1, 4, NODE, job_id, launcher)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_first_and_only_rank(launched: Launched, launcher: str) -> None:
    """Check that a rank of 0 is a number, not a missing value."""
    variables, job_id = LAUNCHERS[launcher]
    smallest = {"5": "0", "1": "0", "8": "1", "4": "1", "4(x2)": "1"}
    job = launched({name: smallest.get(value, value) for name, value in variables.items()})
    assert job == ioshape.types.Job(0, 1, 0, 1, NODE, job_id, launcher)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_half_of_a_launcher_is_none(launched: Launched, launcher: str) -> None:
    """Check a size without a rank, as in a shell of the allocation, and a rank without a size."""
    variables, _ = LAUNCHERS[launcher]
    rank, size = {
        "torchrun": ("RANK", "WORLD_SIZE"),
        "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "mpich": ("PMI_RANK", "PMI_SIZE"),
        "pmi": ("PMIX_RANK", "PMIX_SIZE"),
    }[launcher]
    for missing in (rank, size):
        job = launched({name: value for name, value in variables.items() if name != missing})
        assert job[:4] == ALONE[:4]
        assert job.source == "alone"
    # Rank and size are enough.
    job = launched({rank: "5", size: "8"})
    assert job[:4] == (5, 8, 0, 1)
    assert job.source == launcher


def test_a_batch_script_is_not_a_step(launched: Launched) -> None:
    """Check that SLURM_PROCID=0 without a step is ignored: sbatch sets it for its script."""
    batch = {
        name: value
        for name, value in SLURM.items()
        if not name.startswith("SLURM_STEP_") and name != "SLURM_LOCALID"
    }
    assert launched({**batch, "SLURM_PROCID": "0"})[:4] == ALONE[:4]


# ---- Nested launchers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "outer", "source", "job_id"),
    [
        # srun starts torchrun on each node, which starts the ranks.
        (TORCHRUN, {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "torchrun", "4711"),
        (TORCHRUN, {**OPENMPI, "OMPI_COMM_WORLD_RANK": "1"}, "torchrun", "run-7"),
        (TORCHRUN, {**MPICH, "PMI_RANK": "1"}, "torchrun", "run-7"),
        # mpirun runs in an allocation of Slurm.
        (OPENMPI, {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "openmpi", "4711"),
        # srun --mpi=pmix and srun --mpi=pmi2 set the variables of both.
        (SLURM, {**PMI, "PMIX_LOCAL_SIZE": "9"}, "slurm", "4711"),
        (SLURM, {**MPICH, "MPI_LOCALNRANKS": "9"}, "slurm", "4711"),
    ],
)
def test_the_innermost_launcher_counts(
    launched: Launched, inner: dict[str, str], outer: dict[str, str], source: str, job_id: str
) -> None:
    job = launched({**outer, **inner})
    assert job == ioshape.types.Job(5, 8, 1, 4, NODE, job_id, source)


def test_torchruns_none_is_no_name(launched: Launched) -> None:
    assert launched({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).id == ""


def test_a_port_alone_names_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a port alone names no job.

    Most torchruns use the same port. Two jobs in one directory would take each other for their own
    past.
    """
    monkeypatch.setenv("MASTER_PORT", "29500")
    unnamed = ioshape.types.Job(0, 8, 0, 8, NODE, "", "torchrun")
    assert _token(unnamed, None) == ""
    assert _token(unnamed._replace(id="4711"), None) == "4711:29500"
    assert _token(unnamed._replace(id="4711"), "mine") == "mine:29500"


# ---- Slurm's lists of tasks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "sizes"),
    [
        ("4", [4]),
        ("4(x2)", [4, 4]),
        ("4(x2),3", [4, 4, 3]),
        ("2,4(x2),3", [2, 4, 4, 3]),
        ("1(x3),5(x2),7", [1, 1, 1, 5, 5, 7]),
        ("128(x1000)", [128] * 1000),
        # An unreadable list counts as one task on each node. An impossible number of nodes is no
        # error.
        ("", [1]),
        ("x", [1]),
        ("4(x99999999999999999999)", [4] * 100),
    ],
)
def test_tasks_on_a_node(launched: Launched, tasks: str, sizes: list[int]) -> None:
    for node in {0, len(sizes) // 2, len(sizes) - 1}:
        job = launched({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)})
        assert job.local_world_size == sizes[node]
        assert job.source == "slurm"
    if len(sizes) < 100:
        job = launched(
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(len(sizes))}
        )
        assert job.local_world_size == 1


# ---- Junk ----------------------------------------------------------------------------------------

JUNK = ["", " ", "x", "-1", "1.5", "0x1", "²", "1 2", "9" * 5000, "5;8"]


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_junk_is_nobodys_rank(launched: Launched, launcher: str, junk: str) -> None:
    variables, _ = LAUNCHERS[launcher]
    numbers = [name for name, value in variables.items() if re.fullmatch("[1458]", value)]
    for name in numbers:
        job = launched({**variables, name: junk})
        assert 0 <= job.rank < job.world_size
        assert job.source in (launcher, "alone")
        assert job.local_world_size >= 1
        assert job.local_rank >= 0
    everywhere = launched({**variables, **dict.fromkeys(numbers, junk)})
    assert everywhere[:4] == ALONE[:4]
    assert everywhere.source == "alone"


@pytest.mark.parametrize(("rank", "size"), [("8", "8"), ("9", "8"), ("0", "0")])
def test_ranks_beyond_the_size_are_nobodys(launched: Launched, rank: str, size: str) -> None:
    assert launched({**TORCHRUN, "RANK": rank, "WORLD_SIZE": size})[:4] == ALONE[:4]


# ---- Effects of the ranks of a node --------------------------------------------------------------


def _staging_mib() -> int:
    ioshape.configure()  # a new context reads the job again
    with pytest.raises(ioshape.StorageError) as caught:
        ioshape.staging.reserve(1 << 50)
    assert caught.value.needed_bytes == 1 << 50
    assert caught.value.free_bytes
    return caught.value.free_bytes >> 20


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_memory_is_shared_by_the_ranks_of_a_node(launched: Launched, launcher: str) -> None:
    launched({})
    alone = _staging_mib()
    launched(LAUNCHERS[launcher][0])
    assert _staging_mib() == pytest.approx(max(alone / 4, 64), rel=0.05, abs=32)


_THREADS_WHILE_STAGING = """
    import os

    import ioshape
    import torch

    def threads():
        return len(os.listdir("/proc/self/task"))

    def look(progress):
        if progress.phase == "stage":
            seen.append(threads())

    state = {"weights": torch.ones(256 << 20, dtype=torch.uint8)}
    ioshape.save_async(state, "first.pt").wait()
    seen, before = [], threads()
    ioshape.save_async(state, "second.pt", progress=look).wait()
    print(max(seen) - before)
"""


def test_ranks_of_a_host_share_its_cores(tmp_path: Path) -> None:
    """Check that a rank copies with one thread if the host has as many ranks as cores."""
    ranks = str(os.cpu_count() or 1)
    launched = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": ranks}
    assert run_program(tmp_path, _THREADS_WHILE_STAGING, variables=launched).stdout == "0\n"


# ---- Real launchers ------------------------------------------------------------------------------

RANK = """
    import json
    import sys

    import torch.distributed as dist
    import torch

    import ioshape
    from checkpoints import checkpoint

    seen = {"launched": ioshape.job()}
    dist.init_process_group("gloo")
    seen["grouped"] = ioshape.job()
    total = torch.tensor([ioshape.job().rank + 1])
    dist.all_reduce(total)
    seen["total"] = int(total)

    rank = ioshape.job().rank
    handle = ioshape.save_async(checkpoint(rank), f"files/rank-{rank}.pt")
    ioshape.save(checkpoint(100 + rank), f"files/{rank}.pt")
    # Some give all ranks one path. That is no good idea, but no file may be torn by it.
    ioshape.save(checkpoint(200 + rank), "files/shared.pt")
    handle.wait()
    dist.barrier()
    dist.destroy_process_group()
    seen["afterwards"] = ioshape.job()
    with open(f"seen-{rank}.json", "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.long  # test_torchrun of test_run.py compares the jobs
def test_torchrun_with_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    launch = """
        import runpy
        import sys

        sys.argv = ["torchrun", "--standalone", "--nproc-per-node=2", "rank.py"]
        runpy.run_module("torch.distributed.run", run_name="__main__")
    """
    (tmp_path / "rank.py").write_text("\n".join(line[4:] for line in RANK.splitlines()))
    run_interpreter(tmp_path, launch)
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        launched, grouped = (
            ioshape.types.Job(*seen["launched"]),
            ioshape.types.Job(*seen["grouped"]),
        )
        assert launched[:5] == (rank, 2, rank, 2, NODE)
        assert launched.source == "torchrun"
        assert grouped == launched._replace(source="torch.distributed")
        assert ioshape.types.Job(*seen["afterwards"]) == launched
        assert seen["total"] == 3
        assert number_in(tmp_path / "files" / f"rank-{rank}.pt") == rank
        assert number_in(tmp_path / "files" / f"{rank}.pt") == 100 + rank
    assert number_in(tmp_path / "files" / "shared.pt") in (200, 201)
    assert len(names_in(tmp_path / "files")) == 5


@pytest.mark.slow
def test_a_process_group_knows_best(tmp_path: Path) -> None:
    """Check that a process group that the program created overrides the variables."""
    finished = run_program(
        tmp_path,
        """
        import torch.distributed as dist

        import ioshape

        assert ioshape.job()[:4] == (5, 8, 1, 4), ioshape.job()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        print(*ioshape.job()[:4], ioshape.job().source)
        """,
        variables=TORCHRUN,
    )
    assert finished.stdout.split() == ["0", "1", "1", "4", "torch.distributed"]


SPAWN = """
    import os
    from pathlib import Path

    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp

    import ioshape


    def read_bytes():
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"])


    def run(rank, ranks, n_bytes):
        meet = f"file://{os.getcwd()}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
        if not rank:
            ioshape.save({"weights": torch.ones(n_bytes, dtype=torch.uint8)}, "model.pt")
            with open("model.pt", "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        before = read_bytes()
        assert ioshape.load("model.pt")["weights"].sum() == n_bytes
        Path(f"read-{rank}").write_text(str(read_bytes() - before))
        dist.barrier()
        dist.destroy_process_group()


    if __name__ == "__main__":
        mp.spawn(run, (2, 32 << 20), nprocs=2)
"""


@pytest.mark.long
def test_what_ranks_of_spawn_want_is_read_once(tmp_path: Path) -> None:
    """Check that processes of mp.spawn read a file once.

    No launcher reports that they share a host.
    """
    run_interpreter(tmp_path, SPAWN)
    read = sum(int((tmp_path / f"read-{rank}").read_text()) for rank in range(2))
    if not read:
        pytest.skip("the folder for temporary files is on no disk")
    assert 32 << 20 <= read < 1.05 * (32 << 20)
