# SPDX-License-Identifier: Apache-2.0
"""Compare torch.distributed.checkpoint with ioshape's and its own writer and reader; four ranks."""

import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ports import free_port

from . import fio
from .cache import evict, require_cold
from .gather_ranks import Ranks, all_of, one_of
from .gather_torch import FIO_TUNINGS, MIB, launch_environment
from .rounds import (
    Sample,
    fastest,
    median_gb_per_s,
    median_seconds,
    speed_ratio,
    time_ratio,
)
from .setting import Figure, Outcome, Setting
from .worker import Worker

RANKS = 4
OURS, STOCK = "ioshape", "stock"


@contextmanager
def dcp_ranks() -> Iterator[Ranks]:
    with ExitStack() as stack:
        port, token = free_port(), uuid.uuid4().hex
        workers = []
        for rank in range(RANKS):
            environment = launch_environment(rank, RANKS, 1, port, token)
            command = (sys.executable, "-m", f"{__package__}.frameworks_dcp_process")
            workers.append(Worker(*command, environment=environment))
            stack.enter_context(workers[-1])
        ranks = Ranks(workers)
        ranks.each("meet")
        yield ranks


def save(ranks: Ranks, how: str, path: Path) -> Sample:
    return all_of(ranks.together("save", how=how, path=path), ranks.tensor_bytes)


def load(setting: Setting, ranks: Ranks, how: str, path: Path) -> Sample:
    files = list(path.iterdir())
    for file in files:
        evict(file)
    require_cold(setting, files)
    return all_of(ranks.together("load", how=how, path=path), ranks.tensor_bytes)


def settle(setting: Setting) -> None:
    for path in setting.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    setting.rest()


def measure_saves(setting: Setting, outcome: Outcome, ranks: Ranks) -> None:
    n_bytes = int(ranks.tensor_bytes) // (16 * MIB) * 16 * MIB
    fios = {
        str(one): partial(fio.run, one, "write", setting.folder / "fio", n_bytes)
        for one in FIO_TUNINGS
    }
    dcps = {how: partial(save, ranks, how, setting.folder / how) for how in (OURS, STOCK)}
    samples = setting.compare({**fios, **dcps}, setting.rounds, partial(settle, setting))
    outcome.samples["dcp save"] = samples
    disk = fastest(samples, list(fios))
    ours, stock, best = (samples[name] for name in (OURS, STOCK, disk))
    speeds = [f"{median_gb_per_s(one):.2f}" for one in (ours, stock, best)]
    outcome.figures += [
        Figure(
            "dcp_save_vs_stock_fsync",
            speed_ratio(ours, stock),
            ">=",
            2,
            f"{speeds[0]} to {speeds[1]} GB/s of {RANKS} ranks, both durable",
        ),
        Figure(
            "dcp_save_vs_fio",
            speed_ratio(ours, best),
            ">=",
            0.85,
            f"{speeds[0]} to {speeds[2]} GB/s ({disk})",
        ),
    ]


def measure_loads(setting: Setting, outcome: Outcome, ranks: Ranks) -> None:
    settle(setting)
    path = setting.folder / STOCK
    save(ranks, STOCK, path)
    loads = {how: partial(load, setting, ranks, how, path) for how in (OURS, STOCK)}
    samples = setting.compare(loads, setting.rounds, setting.rest)
    outcome.samples["dcp load"] = samples
    ours, stock = samples[OURS], samples[STOCK]
    outcome.figures.append(
        Figure(
            "dcp_load_vs_stock",
            speed_ratio(ours, stock),
            ">=",
            1.5,
            f"{median_gb_per_s(ours):.2f} to {median_gb_per_s(stock):.2f} GB/s of {RANKS} ranks, "
            "cold; ours verified",
        )
    )
    settle(setting)


def stall(ranks: Ranks, how: str, path: Path) -> Sample:
    return one_of(ranks.together("save_async", how=how, path=path), ranks.tensor_bytes)


def measure_stalls(setting: Setting, outcome: Outcome, ranks: Ranks) -> None:
    calls = {how: partial(stall, ranks, how, setting.folder / how) for how in (OURS, STOCK)}
    for call in calls.values():
        call()
    samples = setting.compare(calls, setting.rounds, partial(settle, setting))
    outcome.samples["dcp async"] = samples
    ours, stock = samples[OURS], samples[STOCK]
    outcome.figures.append(
        Figure(
            "dcp_async_stall_vs_stock",
            time_ratio(ours, stock),
            "<=",
            0.5,
            f"{median_seconds(ours):.3f} to {median_seconds(stock):.3f} s in dcp.async_save()",
        )
    )
    settle(setting)


def measure(setting: Setting, outcome: Outcome) -> None:
    with dcp_ranks() as ranks:
        made = ranks.each("make", size=setting.size // RANKS)
        ranks.tensor_bytes = sum(float(one["bytes"]) for one in made)
        setting.say(
            f"DCP, {RANKS} ranks, {ranks.tensor_bytes / 1e9:.2f} GB: {setting.rounds} rounds"
        )
        settle(setting)
        save(ranks, OURS, setting.folder / OURS)
        save(ranks, STOCK, setting.folder / STOCK)
        measure_saves(setting, outcome, ranks)
        measure_loads(setting, outcome, ranks)
        measure_stalls(setting, outcome, ranks)
