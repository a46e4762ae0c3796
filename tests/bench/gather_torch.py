# SPDX-License-Identifier: Apache-2.0
"""Measure ranks in Python: one writer for all nodes over gloo, and concurrent loads."""

import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryDirectory

from ports import free_port

from . import fio
from .cache import evict, require_cold
from .gather_node import settle, steps
from .gather_ranks import Ranks, all_of, node_of
from .rounds import GB, Sample, fastest, median_gb_per_s, median_seconds, time_ratio
from .setting import Figure, Outcome, Setting
from .torch_worker import ROOM_FOR_ONE, Ballast, clear
from .worker import Answer, Worker

MIB = 1 << 20

RANKS = 8
# The faster of these is the disk's ceiling.
FIO_TUNINGS = [fio.Tuning("io_uring", 4 * MIB, 32), fio.Tuning("libaio", 16 * MIB, 16)]
GLOO_WAYS = ("in turn", "at once")

# The memory of the writer is measured with this many bytes, whatever --size is.
LARGE_BYTES = 8 << 30
# All ranks map one file in memory as their state.
SHARED_MEMORY = Path("/dev/shm")
WRITE_PIECE = 16 * MIB

OURS = "ioshape"
TORCH = "torch.load"


def launch_environment(rank: int, ranks: int, nodes: int, port: int, token: str) -> dict[str, str]:
    """Return the environment that torchrun would have set for this rank."""
    node = node_of(rank, ranks, nodes)
    on_node = [other for other in range(ranks) if node_of(other, ranks, nodes) == node]
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(on_node.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(on_node)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RUN_ID": token,
        "IOSHAPE_TEST_NODE": f"{token}-{node}",
        "IOSHAPE_TEST_STORE": "host",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def torch_ranks(nodes: int, ranks: int = RANKS, **more: str) -> Iterator[Ranks]:
    with ExitStack() as stack:
        port, token = free_port(), uuid.uuid4().hex
        workers = []
        for rank in range(ranks):
            environment = {**launch_environment(rank, ranks, nodes, port, token), **more}
            command = (sys.executable, "-m", f"{__package__}.gather_process")
            workers.append(Worker(*command, environment=environment))
            stack.enter_context(workers[-1])
        crew = Ranks(workers)
        crew.each("meet")
        yield crew


@contextmanager
def lone_ranks(ranks: int) -> Iterator[Ranks]:
    """Start processes without a launcher: no variable describes their job."""
    with ExitStack() as stack:
        command = (sys.executable, "-m", f"{__package__}.gather_process")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        workers = [Worker(*command, environment=environment) for _ in range(ranks)]
        for worker in workers:
            stack.enter_context(worker)
        yield Ranks(workers)


# ---- One writer for all nodes -------------------------------------------------------------------


def save(ranks: Ranks, directory: Path) -> list[Answer]:
    return ranks.together("save_group", path=directory, step=next(steps), mode="rank0")


def save_sample(ranks: Ranks, directory: Path) -> Sample:
    return all_of(save(ranks, directory), ranks.tensor_bytes)


def send_sample(ranks: Ranks, how: str) -> Sample:
    return all_of(ranks.together("gloo", how=how), ranks.tensor_bytes)


def measure_floor(setting: Setting, outcome: Outcome, ranks: Ranks, directory: Path) -> None:
    ranks.tensor_bytes = sum(
        float(one["bytes"]) for one in ranks.each("make", size=setting.size // RANKS)
    )
    ranks.each("buffers", size=int(ranks.tensor_bytes) // RANKS)
    setting.say(f"rank0 over gloo, {ranks.tensor_bytes / GB:.2f} GB: {setting.rounds} rounds")
    settle(setting, directory)
    save(ranks, directory)
    fio_bytes = int(ranks.tensor_bytes) // (16 * MIB) * 16 * MIB
    fios = {
        str(one): partial(fio.run, one, "write", setting.folder / "fio", fio_bytes)
        for one in FIO_TUNINGS
    }
    gloos = {f"gloo {how}": partial(send_sample, ranks, how) for how in GLOO_WAYS}
    for gloo in gloos.values():
        gloo()
    samples = setting.compare(
        {**fios, **gloos, OURS: partial(save_sample, ranks, directory)},
        setting.rounds,
        partial(settle, setting, directory),
    )
    judge_floor(outcome, samples, fastest(samples, list(fios)), fastest(samples, list(gloos)))


def judge_floor(outcome: Outcome, samples: dict[str, list[Sample]], disk: str, gloo: str) -> None:
    ours = samples[OURS]
    outcome.samples["rank0"] = samples
    outcome.facts["rank0"] = {"ranks": RANKS, "nodes": RANKS, "last": ours[-1].details}
    ceilings = [median_gb_per_s(samples[one]) for one in (disk, gloo)]
    outcome.ceilings += [
        f"durable direct writes: {ceilings[0]:.2f} GB/s ({disk})",
        f"{RANKS - 1} processes send to one: {ceilings[1]:.2f} GB/s of all ranks' bytes ({gloo})",
    ]
    ratio = median(
        own.gb_per_s / min(one.gb_per_s, other.gb_per_s)
        for own, one, other in zip(ours, samples[disk], samples[gloo], strict=True)
    )
    outcome.figures.append(
        Figure(
            "rank0_vs_floor",
            ratio,
            ">=",
            0.7,
            f"{median_gb_per_s(ours):.2f} GB/s to {ceilings[0]:.2f} of {disk} and "
            f"{ceilings[1]:.2f} of {gloo}",
        )
    )


def measure_memory(setting: Setting, outcome: Outcome, ranks: Ranks, directory: Path) -> None:
    each = LARGE_BYTES // RANKS
    setting.say(f"{LARGE_BYTES >> 30} GiB to one writer: its memory")
    ranks.each("buffers", size=0)
    ranks.each("forget")
    settle(setting, directory)
    with NamedTemporaryFile(dir=SHARED_MEMORY, prefix="ioshape-bench-") as file:
        for _ in range(each // WRITE_PIECE):
            file.write(os.urandom(WRITE_PIECE))
        file.flush()
        ranks.each("share", path=file.name, size=each)
        answers = save(ranks, directory)
        ranks.each("forget")
    extra = [float(one["extra_bytes"]) / MIB for one in answers]
    sample = all_of(answers, LARGE_BYTES)
    outcome.facts["rank0, memory"] = {"extra_mib": extra, "seconds": sample.seconds}
    outcome.figures.append(
        Figure(
            "rank0_writer_mib",
            extra[0],
            "<=",
            256,
            f"MiB, {LARGE_BYTES >> 30} GiB in {sample.seconds:.1f} s; other ranks up to "
            f"{max(extra[1:]):.0f}",
        )
    )


# ---- Loads by all ranks of a node ---------------------------------------------------------------


def torch_file(setting: Setting, rank: int) -> Path:
    return setting.folder / f"torch-{rank}.pt"


def files_of(setting: Setting, directory: Path) -> list[Path]:
    return [
        *(torch_file(setting, rank) for rank in range(RANKS)),
        *directory.glob("step-*/*"),
    ]


def chill(setting: Setting, ranks: Ranks, directory: Path) -> None:
    """Empty the page cache, and free memory for it and for the loaded state."""
    files = files_of(setting, directory)
    ranks.each("prepare_load")
    for path in files:
        evict(path)
    ballast = Ballast(int(2 * setting.size * ROOM_FOR_ONE))
    ballast.take()
    setting.rest()
    require_cold(setting, (path for path in files if path.stat().st_size > MIB))
    ballast.give()


def load(ranks: Ranks, how: str, paths: Sequence[Path], *, check: bool = False) -> Sample:
    answers = ranks.together_each(
        "load", [{"how": how, "path": path, "check": int(check)} for path in paths]
    )
    return all_of(answers, ranks.tensor_bytes)


def measure_load(
    setting: Setting, outcome: Outcome, ours: Ranks, theirs: Ranks, directory: Path
) -> None:
    """Compare loads. Other ranks load with torch: see same_file.readers()."""
    for ranks in (ours, theirs):
        ranks.tensor_bytes = sum(
            float(one["bytes"]) for one in ranks.each("make", size=setting.size // RANKS)
        )
    clear(setting)
    ours.each("save_group", path=directory, step=next(steps), mode="node")
    paths = [torch_file(setting, rank) for rank in range(RANKS)]
    theirs.together_each("save_torch", [{"path": path} for path in paths])
    for ranks in (ours, theirs):
        ranks.each("forget")
    loaders = {
        OURS: partial(load, ours, OURS, [directory] * RANKS),
        TORCH: partial(load, theirs, TORCH, paths),
    }
    for loader in loaders.values():
        loader(check=True)
    setting.say(f"{RANKS} loads at once, cold cache: {setting.rounds} rounds")
    samples = setting.compare(
        dict(loaders), setting.rounds, partial(chill, setting, ours, directory)
    )
    outcome.samples["loads, cold"] = samples
    outcome.figures.append(
        Figure(
            "load_group_vs_torch",
            time_ratio(samples[OURS], samples[TORCH]),
            "<=",
            0.6,
            f"{median_seconds(samples[OURS]):.3f} s, verified, to "
            f"{median_seconds(samples[TORCH]):.3f} s of {RANKS} torch.load at once",
        )
    )


# ---- Both measurements --------------------------------------------------------------------------


def measure_rank0(setting: Setting, outcome: Outcome) -> None:
    clear(setting)
    directory = setting.folder / "checkpoints"
    with torch_ranks(RANKS, IOSHAPE_COORDINATOR="open") as ranks:
        measure_floor(setting, outcome, ranks, directory)
        measure_memory(setting, outcome, ranks, directory)
    clear(setting)


def measure_loads(setting: Setting, outcome: Outcome) -> None:
    clear(setting)
    # Use local slots, in a folder of this benchmark: other jobs on this machine do not share them.
    with (
        TemporaryDirectory(prefix="ioshape-bench-") as slots,
        torch_ranks(1, IOSHAPE_COORDINATOR=f"local:{slots}") as ours,
        torch_ranks(1) as theirs,
    ):
        measure_load(setting, outcome, ours, theirs, setting.folder / "checkpoints")
    clear(setting)


def measure(setting: Setting, outcome: Outcome) -> None:
    measure_rank0(setting, outcome)
    measure_loads(setting, outcome)
