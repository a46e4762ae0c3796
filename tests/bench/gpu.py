# SPDX-License-Identifier: Apache-2.0
"""Compare saves from a GPU and loads to one with copies of pinned memory and with the storage."""

import sys
from functools import partial
from pathlib import Path

from . import fio
from .rounds import GB, Sample, Samples, fastest, median_gb_per_s
from .setting import Figure, Outcome, Setting, speed_figure
from .torch_load import chill, warm
from .torch_worker import OURS, sample_of
from .worker import Worker

PINNED = "pinned copies"
RIVAL = "fastsafetensors"


def limit(samples: Samples, fios: list[str]) -> str:
    """Return the ceiling of a save or load: the slower of the storage and pinned copies."""
    storage = fastest(samples, fios)
    return min((storage, PINNED), key=lambda name: median_gb_per_s(samples[name]))


def vs_limit(outcome: Outcome, samples: Samples, figure: str, fios: list[str]) -> None:
    slower, storage = limit(samples, fios), fastest(samples, fios)
    outcome.figures.append(speed_figure(figure, 0.9, samples, OURS, slower))
    outcome.ceilings += [
        f"{figure}: {name} {median_gb_per_s(samples[name]):.2f} GB/s" for name in (storage, PINNED)
    ]
    outcome.samples[figure] = samples


def pinned(worker: Worker, direction: str, n_bytes: float) -> Sample:
    answer = worker.ask("pinned", direction=direction, bytes=int(n_bytes))
    return sample_of(answer, float(answer["bytes"]))


def load(worker: Worker, n_bytes: float, how: str, path: Path, check: int = 0) -> Sample:
    return sample_of(worker.ask("load", how=how, path=path, check=check), n_bytes)


def measure_saves(setting: Setting, outcome: Outcome, worker: Worker, n_bytes: float) -> None:
    setting.say("saves: choosing fio's settings")
    fios, _speeds = fio.calibrate("write", setting.folder / "fio", setting.size, setting.clear)
    setting.say(f"saves from the GPU: {setting.rounds} rounds")
    samples = setting.compare(
        {
            **fios,
            PINNED: partial(pinned, worker, "from", n_bytes),
            OURS: lambda: sample_of(worker.ask("save", path=setting.folder / OURS), n_bytes),
        },
        setting.rounds,
        setting.settle,
    )
    vs_limit(outcome, samples, "d2h_save_vs_limit", list(fios))
    outcome.facts["last_save"] = samples[OURS][-1].details


def measure_loads(
    setting: Setting, outcome: Outcome, worker: Worker, n_bytes: float, rival: str
) -> None:
    setting.settle()
    path, other = setting.folder / OURS, setting.folder / "safetensors"
    worker.ask("save", path=path)
    if rival:
        worker.ask("save_safetensors", path=other)
    worker.ask("forget")
    load(worker, n_bytes, OURS, path, check=1)
    setting.say("loads: choosing fio's settings")
    chill(setting)
    fios, _speeds = fio.calibrate("read", path, path.stat().st_size, lambda: None)
    setting.say(f"loads to the GPU with a cold cache: {setting.rounds} rounds")
    contestants = {
        PINNED: partial(pinned, worker, "to", n_bytes),
        OURS: partial(load, worker, n_bytes, OURS, path),
    }
    samples = setting.compare({**fios, **contestants}, setting.rounds, partial(chill, setting))
    vs_limit(outcome, samples, "load_gpu_vs_limit", list(fios))
    if rival:
        contestants[RIVAL] = partial(load, worker, n_bytes, "rival", other)
        load(worker, n_bytes, "rival", other, check=1)
    setting.say(f"loads to the GPU from the page cache: {setting.rounds} rounds")
    warm(setting)
    samples = setting.compare(contestants, setting.rounds, partial(warm, setting))
    outcome.samples["from the page cache"] = samples
    speed = median_gb_per_s(samples[OURS])
    remark = f"from the page cache, verified; {PINNED} {median_gb_per_s(samples[PINNED]):.2f} GB/s"
    outcome.figures.append(Figure("load_gpu_warm_gbs", speed, ">=", 20, remark))
    if rival:
        outcome.figures.append(
            speed_figure("load_gpu_vs_fastsafetensors", 1.5, samples, OURS, RIVAL)
        )
    else:
        outcome.ceilings.append(f"{RIVAL} is not installed, and was not measured")


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    with Worker(sys.executable, "-m", f"{__package__}.gpu_process") as worker:
        found = worker.ask("find")
        outcome.facts |= found
        if not found["gpu"]:
            none = f"there is no GPU that torch {found['torch']} can use: nothing was measured"
            setting.say(none)
            outcome.ceilings.append(none)
            return outcome
        n_bytes = float(worker.ask("make", size=setting.size)["bytes"])
        setting.say(f"{n_bytes / GB:.2f} GB on a {found['gpu']}")
        measure_saves(setting, outcome, worker, n_bytes)
        measure_loads(setting, outcome, worker, n_bytes, str(found["rival"]))
    setting.settle()
    return outcome
