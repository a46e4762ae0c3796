# SPDX-License-Identifier: Apache-2.0
"""Compare how long checkpoints of training frameworks block training, with and without ioshape."""

import os
import shutil
import sys
from functools import partial

import frameworks

from .rounds import Sample, median_seconds, time_ratio
from .setting import Figure, Outcome, Setting
from .worker import Worker

#: For each framework, the environment it is installed in (None: this one), and the baseline.
FRAMEWORKS = {
    "lightning": (None, "its AsyncCheckpointIO, not durable"),
    "trainer": ("transformers", "its own checkpoint, which it waits for and which is not durable"),
    "deepspeed": ("deepspeed", "its engine, which waits and is not durable"),
}


def save(setting: Setting, worker: Worker, way: str) -> Sample:
    answer = worker.ask("save", way=way, folder=setting.folder)
    return Sample(float(answer["seconds"]), setting.size // 4)


def settle(setting: Setting) -> None:
    for path in setting.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    setting.rest()


def measure(setting: Setting, outcome: Outcome) -> None:
    size = setting.size // 4
    for name, (installed_as, theirs) in FRAMEWORKS.items():
        setting.say(f"{name}, {size / 1e9:.2f} GB: {setting.rounds} rounds")
        try:
            python = str(frameworks.environment(installed_as)) if installed_as else sys.executable
        except frameworks.CannotInstall as problem:
            setting.say(f"not measured: {problem}")
            continue
        # No training runs, so the tensors never change.
        variables = {**os.environ, "IOSHAPE_EXAMINE": "unchanged=off"}
        command = (python, "-m", f"{__package__}.frameworks_stall_process", name)
        with Worker(*command, environment=variables) as worker:
            worker.ask("make", size=size)
            ways = {way: partial(save, setting, worker, way) for way in ("ioshape", "stock")}
            for one in ways.values():
                one()
            samples = setting.compare(ways, setting.rounds, partial(settle, setting))
        settle(setting)
        outcome.samples[f"{name} stall"] = samples
        ours, stock = samples["ioshape"], samples["stock"]
        outcome.figures.append(
            Figure(
                f"{name}_stall_vs_stock",
                time_ratio(ours, stock),
                "<=",
                0.3,
                f"{median_seconds(ours):.3f} s of training to {median_seconds(stock):.3f} s of "
                f"{theirs}",
            )
        )
