# SPDX-License-Identifier: Apache-2.0
"""Measure ranks in Python: one writer for all nodes over gloo, and concurrent loads."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryDirectory

from nodes import rank_variables
from ports import free_port

from . import fio
from .cache import evict, require_cold
from .gather_node import settle, steps
from .gather_ranks import Ranks, all_of
from .rounds import GB, Sample, fastest, median_gb_per_s
from .setting import Figure, Outcome, Setting, time_figure
from .torch_worker import ROOM_FOR_ONE, Ballast, processes
from .worker import Answer

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


@contextmanager
def torch_ranks(
    nodes: int, ranks: int = RANKS, module: str = "gather_process", **more: str
) -> Iterator[Ranks]:
    """Start ranks as torchrun would, which meet over gloo."""
    told = {"IOSHAPE_TEST_STORE": "host", "OMP_NUM_THREADS": "1", **more}
    variables = rank_variables(ranks, nodes, port=free_port(), network=None, **told)
    with processes(module, [{**os.environ, **own} for own in variables]) as workers:
        crew = Ranks(workers)
        crew.each("meet")
        yield crew


@contextmanager
def lone_ranks(ranks: int) -> Iterator[Ranks]:
    """Start processes without a launcher: no variable describes their job."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with processes("gather_process", [environment] * ranks) as workers:
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
    path, n_bytes = setting.folder / "fio", int(ranks.tensor_bytes)
    fios = fio.contestants(FIO_TUNINGS, "write", path, n_bytes)
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
    extra = [float(one["extra_mib"]) for one in answers]
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
    setting.clear()
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
    outcome.figures.append(time_figure("load_group_vs_torch", 0.6, samples, OURS, TORCH))


# ---- Both measurements --------------------------------------------------------------------------


def measure_rank0(setting: Setting, outcome: Outcome) -> None:
    setting.clear()
    directory = setting.folder / "checkpoints"
    with torch_ranks(RANKS, IOSHAPE_COORDINATOR="open") as ranks:
        measure_floor(setting, outcome, ranks, directory)
        measure_memory(setting, outcome, ranks, directory)
    setting.clear()


def measure_loads(setting: Setting, outcome: Outcome) -> None:
    setting.clear()
    # Use local slots, in a folder of this benchmark: other jobs on this machine do not share them.
    with (
        TemporaryDirectory(prefix="ioshape-bench-") as slots,
        torch_ranks(1, IOSHAPE_COORDINATOR=f"local:{slots}") as ours,
        torch_ranks(1) as theirs,
    ):
        measure_load(setting, outcome, ours, theirs, setting.folder / "checkpoints")
    setting.clear()


def measure(setting: Setting, outcome: Outcome) -> None:
    measure_rank0(setting, outcome)
    measure_loads(setting, outcome)
