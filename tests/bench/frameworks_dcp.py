# SPDX-License-Identifier: Apache-2.0
"""Compare torch.distributed.checkpoint with ioshape's and its own writer and reader; four ranks."""

from functools import partial
from pathlib import Path

from . import fio
from .cache import evict, require_cold
from .gather_ranks import Ranks, all_of, one_of
from .gather_torch import FIO_TUNINGS, torch_ranks
from .rounds import Sample, fastest
from .setting import Outcome, Setting, speed_figure, time_figure

RANKS = 4
OURS, STOCK = "ioshape", "stock"


def save(ranks: Ranks, how: str, path: Path) -> Sample:
    return all_of(ranks.together("save", how=how, path=path), ranks.tensor_bytes)


def load(setting: Setting, ranks: Ranks, how: str, path: Path) -> Sample:
    files = list(path.iterdir())
    for file in files:
        evict(file)
    require_cold(setting, files)
    return all_of(ranks.together("load", how=how, path=path), ranks.tensor_bytes)


def measure_saves(setting: Setting, outcome: Outcome, ranks: Ranks) -> None:
    path, n_bytes = setting.folder / "fio", int(ranks.tensor_bytes)
    fios = fio.contestants(FIO_TUNINGS, "write", path, n_bytes)
    dcps = {how: partial(save, ranks, how, setting.folder / how) for how in (OURS, STOCK)}
    samples = setting.compare({**fios, **dcps}, setting.rounds, setting.settle)
    outcome.samples["dcp save"] = samples
    outcome.figures += [
        speed_figure("dcp_save_vs_stock_fsync", 2, samples, OURS, STOCK),
        speed_figure("dcp_save_vs_fio", 0.85, samples, OURS, fastest(samples, list(fios))),
    ]


def measure_loads(setting: Setting, outcome: Outcome, ranks: Ranks) -> None:
    setting.settle()
    path = setting.folder / STOCK
    save(ranks, STOCK, path)
    loads = {how: partial(load, setting, ranks, how, path) for how in (OURS, STOCK)}
    samples = setting.compare(loads, setting.rounds, setting.rest)
    outcome.samples["dcp load"] = samples
    remark = ", cold; ours verified"
    outcome.figures.append(speed_figure("dcp_load_vs_stock", 1.5, samples, OURS, STOCK, remark))
    setting.settle()


def stall(ranks: Ranks, how: str, path: Path) -> Sample:
    return one_of(ranks.together("save_async", how=how, path=path), ranks.tensor_bytes)


def measure_stalls(setting: Setting, outcome: Outcome, ranks: Ranks) -> None:
    calls = {how: partial(stall, ranks, how, setting.folder / how) for how in (OURS, STOCK)}
    for call in calls.values():
        call()
    samples = setting.compare(calls, setting.rounds, setting.settle)
    outcome.samples["dcp async"] = samples
    remark = ", in dcp.async_save()"
    figure = time_figure("dcp_async_stall_vs_stock", 0.5, samples, OURS, STOCK, remark)
    outcome.figures.append(figure)
    setting.settle()


def measure(setting: Setting, outcome: Outcome) -> None:
    with torch_ranks(1, RANKS, "frameworks_dcp_process") as ranks:
        made = ranks.each("make", size=setting.size // RANKS)
        ranks.tensor_bytes = sum(float(one["bytes"]) for one in made)
        setting.say(
            f"DCP, {RANKS} ranks, {ranks.tensor_bytes / 1e9:.2f} GB: {setting.rounds} rounds"
        )
        setting.settle()
        save(ranks, OURS, setting.folder / OURS)
        save(ranks, STOCK, setting.folder / STOCK)
        measure_saves(setting, outcome, ranks)
        measure_loads(setting, outcome, ranks)
        measure_stalls(setting, outcome, ranks)
