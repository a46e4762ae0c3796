# SPDX-License-Identifier: Apache-2.0
"""Measure save_async: how long the call blocks, and how saves slow down a training loop."""

from functools import partial

from .rounds import GB, Sample, Samples, median_gb_per_s, median_seconds, time_ratio
from .setting import Figure, Outcome, Setting, time_figure
from .torch_worker import (
    OURS,
    ROOM_FOR_ONE,
    TORCH,
    median_part,
    parts_in_words,
    sample_of,
    settle,
    workers,
)
from .worker import Worker

LAZY = "ioshape lazy"
MEMCPY = "memcpy"
NOBODY = "nobody"

LOOP_SHARE = 2  # the loop saves size // LOOP_SHARE

# Rows of a step's batch, and steps between two saves. A lazy save copies while a step computes.
# With LONG_STEPS a step takes longer than the copy, as in a real training of this size.
SHORT_STEPS = {"batch_size": 192, "steps_per_save": 20}
LONG_STEPS = {"batch_size": 4800, "steps_per_save": 5}


def stage(setting: Setting, worker: Worker, n_bytes: float) -> Sample:
    """Return a sample of the call. A detail is the time until the file is durable."""
    staged = worker.ask("stage", path=setting.folder / OURS)
    return sample_of({**worker.ask("wait"), **staged}, n_bytes)


def measure_stall(setting: Setting, outcome: Outcome) -> None:
    """Compare the call with memcpy.

    Each save is awaited, so that staging memory is free and warm.
    """

    def prepare(worker: Worker) -> dict[str, float | str]:
        worker.ask("make_room", bytes=setting.size)
        return worker.ask("make", size=setting.size)

    setting.say(f"save_async against memcpy: {setting.rounds} rounds")
    setting.settle()
    with workers([OURS], prepare) as (crew, answer):
        worker, n_bytes = crew[OURS], float(answer["bytes"])
        first = stage(setting, worker, n_bytes)
        worker.ask("memcpy")
        samples = setting.compare(
            {
                OURS: partial(stage, setting, worker, n_bytes),
                MEMCPY: lambda: sample_of(worker.ask("memcpy"), n_bytes),
            },
            setting.rounds,
            setting.settle,
        )
    ours, theirs = samples[OURS], samples[MEMCPY]
    outcome.samples["async"] = samples
    outcome.facts["async"] = {**answer, "first_save": first.details, "last_save": ours[-1].details}
    outcome.ceilings.append(
        f"memcpy into warm memory, one thread: {median_gb_per_s(theirs):.2f} GB/s"
    )
    remark = (
        f"; {parts_in_words(ours, 'pickle stage')}; first save {first.seconds:.3f} s; durable "
        f"after {median_part(ours, 'durable_s'):.3f} s"
    )
    outcome.figures.append(time_figure("async_stall_vs_memcpy", 1.2, samples, OURS, MEMCPY, remark))


def train(
    setting: Setting, worker: Worker, how: str, n_bytes: float, loop: dict[str, int]
) -> Sample:
    answer = worker.ask("train", how=how, path=setting.folder / "step", **loop)
    return sample_of(answer, 0 if how == NOBODY else n_bytes * int(answer["saves"]))


def stalls(samples: Samples, how: str) -> list[Sample]:
    """Return the time that saves added to the loop of the same process in the same round."""
    return [
        Sample(saving.seconds - bare.seconds, saving.bytes)
        for saving, bare in zip(samples[how], samples[f"{how}, no saves"], strict=True)
    ]


def measure_loop(setting: Setting, outcome: Outcome) -> None:
    size = setting.size // LOOP_SHARE
    setting.say(f"a training loop that saves {size / GB:.2f} GB: {setting.rounds} rounds")
    setting.settle()
    with workers([OURS, LAZY, TORCH], lambda worker: worker.ask("make", size=size)) as (
        crew,
        answer,
    ):
        n_bytes = float(answer["bytes"])
        loops = {}
        for how, worker in crew.items():
            steps = LONG_STEPS if how == LAZY else SHORT_STEPS
            loops[how] = partial(train, setting, worker, how, n_bytes, steps)
            loops[f"{how}, no saves"] = partial(train, setting, worker, NOBODY, n_bytes, steps)
        for loop in loops.values():
            setting.settle()
            saves = int(loop().details["saves"])
        room = int(n_bytes * saves * ROOM_FOR_ONE)
        samples = setting.compare(loops, setting.rounds, partial(settle, setting, room))
    ours, lazy, theirs = (stalls(samples, how) for how in (OURS, LAZY, TORCH))
    outcome.samples["loop"] = {
        **samples,
        f"{OURS}, added": ours,
        f"{LAZY}, added": lazy,
        f"{TORCH}, added": theirs,
    }
    outcome.facts["loop"] = {**answer, "saves": saves, "short": SHORT_STEPS, "long": LONG_STEPS}
    bare = {
        how: 1e3 * median_seconds(samples[f"{how}, no saves"]) / median_part(samples[how], "steps")
        for how in (OURS, LAZY)
    }
    outcome.figures += [
        Figure(
            "loop_stall_lazy_vs_torch",
            time_ratio(lazy, theirs),
            "<=",
            0.05,
            f"{median_seconds(lazy) / saves * 1e3:.0f} ms for each save; in the calls "
            f"{median_part(samples[LAZY], 'in_calls_s') / saves * 1e3:.0f} ms; a step takes "
            f"{bare[LAZY]:.0f} ms",
        ),
        Figure(
            "step_slowdown_lazy",
            median_part(samples[LAZY], "step_p99_s")
            / median_part(samples[f"{LAZY}, no saves"], "step_p99_s"),
            "<=",
            1.1,
            "99th percentile of a step while a save is under way to that without saves",
        ),
        Figure(
            "loop_stall_vs_torch",
            time_ratio(ours, theirs),
            "<=",
            0.15,
            f"{median_seconds(ours) / saves * 1e3:.0f} ms to "
            f"{median_seconds(theirs) / saves * 1e3:.0f} ms for each save of torch.save; in the "
            f"calls {median_part(samples[OURS], 'in_calls_s') / saves * 1e3:.0f} and "
            f"{median_part(samples[TORCH], 'in_calls_s') / saves * 1e3:.0f} ms; a step takes "
            f"{bare[OURS]:.1f} ms",
        ),
    ]
