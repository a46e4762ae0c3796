# SPDX-License-Identifier: Apache-2.0
"""Compare blocking saves by ioshape.save with the usual alternatives."""

from functools import partial
from statistics import median

from . import fio
from .rounds import (
    GB,
    Sample,
    Samples,
    fastest,
    median_gb_per_s,
    median_seconds,
    speed_ratio,
    time_ratio,
)
from .setting import Figure, Outcome, Setting
from .torch_worker import (
    MIB,
    OURS,
    ROOM_FOR_ONE,
    TORCH,
    clear,
    parts_in_words,
    sample_of,
    save,
    settle,
    workers,
)
from .worker import Worker

TORCH_FSYNC = "torch_fsync"
SAFETENSORS_FSYNC = "safetensors_fsync"
DCP = "dcp"
PARTS = "pickle plan write sync commit"

FIO_TUNINGS = 2  # The best two of the calibration. All rounds decide which of them is better.

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
        settle(setting)
        save(setting, crew[how], how, n_bytes)
        judge = crew[TORCH if reader == "torch" else how]
        judge.ask("check", how=reader, path=setting.folder / how)


def measure_large(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"{setting.size / GB:.2f} GB of a model and its optimizer: choosing fio's settings")
    path = setting.folder / "fio"
    tunings, speeds = fio.calibrate("write", path, setting.size, partial(clear, setting))
    tunings = tunings[:FIO_TUNINGS]
    clear(setting)
    with workers(READERS, lambda worker: worker.ask("state", size=setting.size)) as (crew, answer):
        n_bytes = float(answer["bytes"])
        setting.say("what each of them saves is loaded and compared")
        check(setting, crew, n_bytes)
        setting.say(f"saves: {setting.rounds} rounds")
        fio_bytes = int(n_bytes) // (16 * MIB) * 16 * MIB
        fios = {str(one): partial(fio.run, one, "write", path, fio_bytes) for one in tunings}
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
        "fio": yardstick,
        "fio_environment": fio.environment(tunings[0]),
        "fio_calibration_gb_per_s": speeds,
        "last_save": samples[OURS][-1].details,
    }
    judge_large(outcome, samples, yardstick)


def judge_large(outcome: Outcome, samples: Samples, yardstick: str) -> None:
    ours = samples[OURS]
    speed = f"{median_gb_per_s(ours):.2f} GB/s"

    def figure(name: str, other: str, target: float, remark: str = "") -> Figure:
        theirs = f"{median_gb_per_s(samples[other]):.2f} GB/s of {other}"
        value = speed_ratio(ours, samples[other])
        return Figure(name, value, ">=", target, f"{speed} to {theirs}{remark}")

    cpus = {how: median(map(cpu_per_gb, samples[how])) for how in (OURS, TORCH, TORCH_FSYNC)}
    outcome.ceilings.append(
        f"durable direct writes: {median_gb_per_s(samples[yardstick]):.2f} GB/s ({yardstick})"
    )
    outcome.figures += [
        figure("save_vs_torch_fsync", TORCH_FSYNC, 1.9),
        figure("save_vs_torch", TORCH, 1.0, ", which leaves them in the page cache"),
        figure(
            "save_vs_fio",
            yardstick,
            0.92,
            f"; seconds: {parts_in_words(ours, PARTS)}",
        ),
        figure("save_vs_safetensors_fsync", SAFETENSORS_FSYNC, 1.5),
        figure("save_vs_dcp", DCP, 1.5),
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
    settle(setting)
    with workers([OURS, DANCE], lambda worker: worker.ask("tiny")) as (crew, _):
        doers = {how: partial(save, setting, crew[how], how, 0) for how in crew}
        for doer in doers.values():
            doer()
        samples = setting.compare(doers, rounds, lambda: None)
    ours, theirs = samples[OURS], samples[DANCE]
    rename_only = [sample_of({"seconds": one.details["without_directory_s"]}, 0) for one in theirs]
    outcome.samples["tiny"] = samples
    outcome.facts["tiny"] = {
        "vs_dance_without_fsync_of_the_directory": time_ratio(ours, rename_only),
        "last_save": ours[-1].details,
    }
    outcome.figures.append(
        Figure(
            "tiny_vs_torch",
            time_ratio(ours, theirs),
            "<=",
            1.5,
            f"{median_seconds(ours) * 1e3:.2f} ms to {median_seconds(theirs) * 1e3:.2f} ms of "
            "torch.save + fsync + rename + fsync of the folder "
            f"({median_seconds(rename_only) * 1e3:.2f} ms without the last); seconds: "
            + parts_in_words(ours, PARTS, digits=5),
        )
    )
