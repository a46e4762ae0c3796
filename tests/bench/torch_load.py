# SPDX-License-Identifier: Apache-2.0
"""Measure loads of a file on disk and of a file in the page cache, into new memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import fio
from .cache import evict, make_warm, require_cold
from .rounds import GB, Sample, Samples, fastest, median_gb_per_s
from .setting import Figure, Outcome, Setting, speed_figure, time_figure
from .torch_worker import OURS, ROOM_FOR_ONE, TORCH, Ballast, sample_of, save, workers
from .worker import Worker

# torch loads its own file and ioshape's. The faster of the two counts.
TORCH_OF_OURS = "torch of our file"
# These contestants load into the tensors of an earlier load, or memcpy() there.
INTO = "ioshape into"
MEMCPY = "memcpy"
# safetensors loads the same tensors without verification.
SAFETENSORS = "safetensors"
MANY_TENSORS = 20000
LOADERS = {
    OURS: (OURS, OURS),
    TORCH: (TORCH, TORCH),
    TORCH_OF_OURS: (TORCH, OURS),
    INTO: (INTO, OURS),
}
SAFE_LOADERS = {SAFETENSORS: (SAFETENSORS, SAFETENSORS)}


def load(
    setting: Setting,
    crew: dict[str, Worker],
    n_bytes: float,
    who: str,
    *,
    check: bool = False,
) -> Sample:
    how, file = {**LOADERS, **SAFE_LOADERS}[who]
    answer = crew[how].ask("load", how=how, path=setting.folder / file, check=int(check))
    return sample_of(answer, n_bytes)


def copy(worker: Worker, n_bytes: float) -> Sample:
    return sample_of(worker.ask("memcpy"), n_bytes)


def files(setting: Setting) -> list[Path]:
    paths = (setting.folder / how for how in (OURS, TORCH, SAFETENSORS))
    return [path for path in paths if path.exists()]


def chill(setting: Setting) -> None:
    """Empty the page cache, and free memory for the cached file and the loaded tensors."""
    for path in files(setting):
        evict(path)
    ballast = Ballast(int(2 * setting.size * ROOM_FOR_ONE))
    ballast.take()
    setting.rest()
    require_cold(setting, files(setting))
    ballast.give()


def warm(setting: Setting) -> None:
    ballast = Ballast(int(setting.size * ROOM_FOR_ONE))
    ballast.take()
    for path in files(setting):
        make_warm(setting, path)
    ballast.give()


def vs_torch(name: str, target: float, samples: Samples) -> Figure:
    return speed_figure(name, target, samples, OURS, fastest(samples, [TORCH, TORCH_OF_OURS]))


def measure_cold(
    setting: Setting, outcome: Outcome, loaders: dict[str, Callable[[], Sample]]
) -> None:
    path = setting.folder / OURS
    setting.say("loads: choosing fio's settings")
    chill(setting)
    # fio reads from the device whatever is cached, so nothing has to be done between its runs.
    fios, speeds = fio.calibrate("read", path, path.stat().st_size, lambda: None)
    setting.say(f"loads with a cold cache: {setting.rounds} rounds")
    samples = setting.compare({**fios, **loaders}, setting.rounds, partial(chill, setting))
    yardstick = fastest(samples, list(fios))
    ceiling = median_gb_per_s(samples[yardstick])
    outcome.samples["loads, cold"] = samples
    outcome.facts["loads, cold"] = {"fio_calibration_gb_per_s": speeds}
    outcome.ceilings.append(f"direct reads: {ceiling:.2f} GB/s ({yardstick})")
    outcome.figures += [
        vs_torch("load_cold_vs_torch", 2.0, samples),
        speed_figure("load_vs_safetensors", 1.2, samples, OURS, SAFETENSORS),
        speed_figure("load_into_vs_fio", 0.92, samples, INTO, yardstick),
        speed_figure("load_vs_fio", 0.85, samples, OURS, yardstick),
    ]


def measure_cached(
    setting: Setting, outcome: Outcome, loaders: dict[str, Callable[[], Sample]]
) -> None:
    setting.say(f"loads from the page cache: {setting.rounds} rounds")
    warm(setting)
    samples = setting.compare(loaders, setting.rounds, partial(warm, setting))
    outcome.samples["loads, cached"] = samples
    extra_mib = max(float(sample.details["extra_mib"]) for sample in samples[INTO])
    outcome.figures += [
        vs_torch("load_cached_vs_torch", 2.5, samples),
        speed_figure("load_into_cached_vs_memcpy", 0.6, samples, INTO, MEMCPY),
        Figure(
            "load_into_extra_mib",
            extra_mib,
            "<=",
            128,
            f"more memory at the peak than before, for {setting.size / GB:.2f} GB",
        ),
    ]


def measure_many(setting: Setting, outcome: Outcome) -> None:
    setting.settle()
    with workers([OURS, TORCH], lambda worker: worker.ask("make_many", tensors=MANY_TENSORS)) as (
        crew,
        answer,
    ):
        n_bytes = float(answer["bytes"])
        for how in (OURS, TORCH):
            save(setting, crew[how], how, n_bytes)
            crew[how].ask("forget")
        setting.say(f"{MANY_TENSORS} tiny tensors: {setting.rounds} rounds")
        loaders = {how: partial(load, setting, crew, n_bytes, how) for how in (OURS, TORCH)}
        for loader in loaders.values():
            loader()
        samples = setting.compare(dict(loaders), setting.rounds, partial(warm, setting))
    outcome.samples["many tensors"] = samples
    outcome.figures.append(time_figure("load_many_tensors_vs_torch", 1.0, samples, OURS, TORCH))


def measure(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"{setting.size / GB:.2f} GB: saving what will be loaded")
    setting.settle()
    with workers(
        [OURS, TORCH, INTO, SAFETENSORS], lambda worker: worker.ask("make", size=setting.size)
    ) as (
        crew,
        answer,
    ):
        n_bytes = float(answer["bytes"])
        for who, how in ((OURS, OURS), (TORCH, TORCH), (SAFETENSORS, "safetensors_fsync")):
            save(setting, crew[who], how, n_bytes)
        (setting.folder / "safetensors_fsync").rename(setting.folder / SAFETENSORS)
        for worker in crew.values():
            worker.ask("forget")
        crew[INTO].ask("make_target", path=setting.folder / OURS)
        loaders = {who: partial(load, setting, crew, n_bytes, who) for who in LOADERS}
        safe = {who: partial(load, setting, crew, n_bytes, who) for who in SAFE_LOADERS}
        for loader in (*loaders.values(), *safe.values()):
            loader(check=True)
        measure_cold(setting, outcome, {**loaders, **safe})
        (setting.folder / SAFETENSORS).unlink()
        measure_cached(setting, outcome, {**loaders, MEMCPY: partial(copy, crew[INTO], n_bytes)})
    measure_many(setting, outcome)
    setting.settle()
