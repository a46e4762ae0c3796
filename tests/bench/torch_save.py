# SPDX-License-Identifier: Apache-2.0
"""Compare blocking saves by ioshape.save with the usual alternatives."""

from functools import partial
from statistics import median

from . import fio
from .rounds import GB, Sample, Samples, fastest, median_gb_per_s
from .setting import Figure, Outcome, Setting, speed_figure, time_figure
from .torch_worker import OURS, ROOM_FOR_ONE, TORCH, parts_in_words, save, settle, workers
from .worker import Worker

TORCH_FSYNC = "torch_fsync"
SAFETENSORS_FSYNC = "safetensors_fsync"
DCP = "dcp"
PARTS = "pickle plan write sync commit"

# The ways to save, and the reader of each format.
READERS = {OURS: "torch", TORCH: "torch", SAFETENSORS_FSYNC: "safetensors", DCP: "dcp"}

TINY_ROUNDS_PER_ROUND = 60
DANCE = "dance"


def cpu_per_gb(sample: Sample) -> float:
    return float(sample.details["cpu_seconds"]) / (sample.bytes / GB)


def check(setting: Setting, crew: dict[str, Worker], n_bytes: float) -> None:
    """Save once in each way, which warms up each process, and load and compare the results.

    ioshape's file is read by stock torch, in a process that never imports ioshape.
    """
    for how, reader in READERS.items():
        setting.settle()
        save(setting, crew[how], how, n_bytes)
        judge = crew[TORCH if reader == "torch" else how]
        judge.ask("check", how=reader, path=setting.folder / how)


def measure_large(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"{setting.size / GB:.2f} GB of a model and its optimizer: choosing fio's settings")
    fios, speeds = fio.calibrate("write", setting.folder / "fio", setting.size, setting.clear)
    setting.clear()
    with workers(READERS, lambda worker: worker.ask("make", size=setting.size)) as (crew, answer):
        n_bytes = float(answer["bytes"])
        setting.say("what each of them saves is loaded and compared")
        check(setting, crew, n_bytes)
        setting.say(f"saves: {setting.rounds} rounds")
        doers = {**{how: crew[how] for how in READERS}, TORCH_FSYNC: crew[TORCH]}
        samples = setting.compare(
            {
                **fios,
                **{how: partial(save, setting, doers[how], how, n_bytes) for how in doers},
            },
            setting.rounds,
            partial(settle, setting, int(n_bytes * ROOM_FOR_ONE)),
        )
    yardstick = fastest(samples, list(fios))
    outcome.samples["saves"] = samples
    outcome.facts["saves"] = {
        **answer,
        "fio_calibration_gb_per_s": speeds,
        "last_save": samples[OURS][-1].details,
    }
    judge_large(outcome, samples, yardstick)


def judge_large(outcome: Outcome, samples: Samples, yardstick: str) -> None:
    ours = samples[OURS]
    cpus = {how: median(map(cpu_per_gb, samples[how])) for how in (OURS, TORCH, TORCH_FSYNC)}
    parts = parts_in_words(ours, PARTS)
    outcome.ceilings.append(
        f"durable direct writes: {median_gb_per_s(samples[yardstick]):.2f} GB/s ({yardstick})"
    )
    outcome.figures += [
        speed_figure("save_vs_torch_fsync", 1.9, samples, OURS, TORCH_FSYNC),
        speed_figure("save_vs_torch", 1.0, samples, OURS, TORCH, ", left in the page cache"),
        speed_figure("save_vs_fio", 0.92, samples, OURS, yardstick, f"; seconds: {parts}"),
        speed_figure("save_vs_safetensors_fsync", 1.5, samples, OURS, SAFETENSORS_FSYNC),
        speed_figure("save_vs_dcp", 1.5, samples, OURS, DCP),
        Figure(
            "cpu_vs_torch",
            median(
                cpu_per_gb(a) / cpu_per_gb(b) for a, b in zip(ours, samples[TORCH], strict=True)
            ),
            "<=",
            0.45,
            f"CPU-seconds per GB: {cpus[OURS]:.3f} to {cpus[TORCH]:.3f} "
            f"({cpus[TORCH_FSYNC]:.3f} with fsync), without what the kernel writes back for torch",
        ),
    ]


def measure_tiny(setting: Setting, outcome: Outcome) -> None:
    """Measure saves that replace an existing file.

    No pause separates the saves, as in a real program.
    """
    rounds = setting.rounds * TINY_ROUNDS_PER_ROUND
    setting.say(f"one tensor of 1 KiB: {rounds} rounds")
    setting.settle()
    with workers([OURS, DANCE], lambda worker: worker.ask("make_tiny")) as (crew, _):
        doers = {how: partial(save, setting, crew[how], how, 0) for how in crew}
        for doer in doers.values():
            doer()
        samples = setting.compare(doers, rounds, lambda: None)
    outcome.samples["tiny"] = samples
    outcome.facts["tiny"] = {"last_save": samples[OURS][-1].details}
    parts = parts_in_words(samples[OURS], PARTS, digits=5)
    remark = f": torch.save + fsync + rename + fsync of the folder; seconds: {parts}"
    outcome.figures.append(time_figure("tiny_vs_torch", 1.5, samples, OURS, DANCE, remark))
