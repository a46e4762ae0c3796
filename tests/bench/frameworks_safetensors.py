# SPDX-License-Identifier: Apache-2.0
"""Compare saving and loading files by ioshape.safetensors and by the original safetensors."""

from functools import partial

from . import fio
from .cache import evict, require_cold
from .rounds import GB, Sample, fastest
from .setting import Outcome, Setting, speed_figure
from .torch_worker import sample_of, save, workers
from .worker import Worker

#: names of these ways to save and to load in torch_process.py
OURS, ORIGINAL = "ioshape safetensors", "safetensors_fsync"
MAPPED, PREAD = "safetensors", "safetensors pread"


def measure_saves(
    setting: Setting, outcome: Outcome, crew: dict[str, Worker], n_bytes: float
) -> None:
    setting.say("safetensors: choosing fio's settings")
    fios, _ = fio.calibrate("write", setting.folder / "fio", setting.size, setting.settle)
    runs = {how: partial(save, setting, worker, how, n_bytes) for how, worker in crew.items()}
    setting.say(f"safetensors, {n_bytes / GB:.2f} GB, saved: {setting.rounds} rounds")
    samples = setting.compare({**fios, **runs}, setting.rounds, setting.settle)
    outcome.samples["safetensors, saved"] = samples
    disk = fastest(samples, list(fios))
    outcome.figures += [
        speed_figure("safetensors_save_vs_original_fsync", 1.5, samples, OURS, ORIGINAL),
        speed_figure("safetensors_save_vs_fio", 0.9, samples, OURS, disk),
    ]


def measure_loads(
    setting: Setting, outcome: Outcome, crew: dict[str, Worker], n_bytes: float
) -> None:
    """Measure loads of a file that is on disk and not in the page cache."""
    setting.settle()
    path = setting.folder / OURS
    save(setting, crew[OURS], OURS, n_bytes)
    for worker in crew.values():
        worker.ask("forget")

    def load(how: str, check: int = 0) -> Sample:
        worker = crew[OURS if how == OURS else ORIGINAL]
        return sample_of(worker.ask("load", how=how, path=path, check=check), n_bytes)

    def chill() -> None:
        evict(path)
        setting.rest()
        require_cold(setting, [path])

    ways = {how: partial(load, how) for how in (OURS, MAPPED, PREAD)}
    for how in ways:
        load(how, check=1)
    setting.say(f"safetensors, loaded with a cold cache: {setting.rounds} rounds")
    samples = setting.compare(ways, setting.rounds, chill)
    outcome.samples["safetensors, loaded"] = samples
    better = fastest(samples, [MAPPED, PREAD])
    outcome.figures.append(
        speed_figure("safetensors_load_vs_original", 1.2, samples, OURS, better, "; ours verified")
    )
    setting.settle()


def measure(setting: Setting, outcome: Outcome) -> None:
    setting.settle()
    with workers([OURS, ORIGINAL], lambda worker: worker.ask("make", size=setting.size)) as (
        crew,
        answer,
    ):
        measure_saves(setting, outcome, crew, float(answer["bytes"]))
        measure_loads(setting, outcome, crew, float(answer["bytes"]))
