# SPDX-License-Identifier: Apache-2.0
"""Compare how long checkpoints of training frameworks block training, with and without ioshape."""

import os
import sys
from functools import partial

import frameworks

from .rounds import Sample
from .setting import Outcome, Setting, time_figure
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
            samples = setting.compare(ways, setting.rounds, setting.settle)
        setting.settle()
        outcome.samples[f"{name} stall"] = samples
        figure = f"{name}_stall_vs_stock"
        outcome.figures.append(time_figure(figure, 0.3, samples, "ioshape", "stock", f": {theirs}"))
