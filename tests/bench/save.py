# SPDX-License-Identifier: Apache-2.0
"""Measure blocking, durable saves."""

from functools import partial
from statistics import median

from . import fio
from .rounds import GB, Sample, Samples, fastest, median_gb_per_s
from .setting import Figure, Outcome, Setting, speed_figure, time_figure

KIB = 1 << 10
MIB = 1 << 20

WRITE_CHUNKS = (256 * KIB, 1 * MIB, 8 * MIB)

MANY = 10_000
MANY_BYTES_EACH = 4 * KIB
MANY_ROUNDS_PER_ROUND = 4  # each is short

TINY_BYTES = 1 * KIB
TINY_ROUNDS_PER_ROUND = 60

OURS = "ioshape"


def save(setting: Setting) -> Sample:
    answer = setting.worker.ask("save", path=setting.folder / "ours.pt")
    return Sample(float(answer["seconds"]), float(answer["tensor_bytes"]), answer)


def write_and_fsync(setting: Setting, chunk: int, size: int, *, packed: bool = False) -> Sample:
    answer = setting.worker.ask(
        "write", path=setting.folder / "plain", chunk=chunk, packed=int(packed)
    )
    return Sample(float(answer["seconds"]), size, answer)


def dance(setting: Setting, size: int) -> Sample:
    answer = setting.worker.ask("dance", path=setting.folder / "plain", bytes=size)
    return Sample(float(answer["seconds"]), size, answer)


def best_chunk(setting: Setting) -> int:
    """Return the size of write() that is the fastest here."""
    speeds = {}
    for chunk in WRITE_CHUNKS:
        setting.settle()
        speeds[chunk] = write_and_fsync(setting, chunk, setting.size).gb_per_s
    return max(speeds, key=lambda chunk: speeds[chunk])


def measure_large(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"{setting.size / GB:.2f} GB of mixed tensors: choosing fio's settings")
    path = setting.folder / "fio"
    answer = setting.worker.ask("tensors", kind="mixed", bytes=setting.size)
    setting.worker.ask("context")
    fios, speeds = fio.calibrate("write", path, setting.size, setting.settle)
    chunk = best_chunk(setting)
    # The first save opens the engine and makes buffers. Later saves keep both.
    setting.settle()
    first = save(setting)
    setting.say(f"{setting.size / GB:.2f} GB of mixed tensors: {setting.rounds} rounds")
    plain = f"write({chunk // KIB}K) + fsync"
    samples = setting.compare(
        {
            **fios,
            OURS: partial(save, setting),
            plain: partial(write_and_fsync, setting, chunk, setting.size),
        },
        setting.rounds,
        setting.settle,
    )
    yardstick = fastest(samples, list(fios))
    outcome.samples["large"] = samples
    outcome.facts["large"] = {
        "tensors": answer["tensors"],
        "bytes": setting.size,
        "fio_calibration_gb_per_s": speeds,
        "first_save": first.details,
        "last_save": samples[OURS][-1].details,
    }
    judge_large(outcome, samples, yardstick, plain)


def judge_large(outcome: Outcome, samples: Samples, yardstick: str, plain: str) -> None:
    ours = samples[OURS]
    ceiling = median_gb_per_s(samples[yardstick])
    cpu = median(float(sample.details["cpu_seconds"]) / (sample.bytes / GB) for sample in ours)
    parts = " + ".join(
        f"{part} {median(float(sample.details[part + '_s']) for sample in ours):.3f}"
        for part in ("plan", "write", "sync", "commit")
    )
    outcome.ceilings.append(f"durable direct writes: {ceiling:.2f} GB/s ({yardstick})")
    outcome.figures += [
        speed_figure("save_vs_fio", 0.95, samples, OURS, yardstick),
        speed_figure("save_vs_write_fsync", 1.5, samples, OURS, plain),
        Figure("save_cpu_s_per_gb", cpu, "<=", 0.20, f"seconds: {parts}"),
    ]


def measure_extra_memory(setting: Setting, outcome: Outcome) -> None:
    """Measure the memory of the first save of a new context, which makes the buffers."""
    extra: dict[str, float] = {}
    subjects: list[tuple[str, dict[str, str | int]]] = [
        ("1 KiB", {"kind": "equal", "count": 1, "each": TINY_BYTES}),
        (f"{MANY} x 4 KiB", {"kind": "equal", "count": MANY, "each": MANY_BYTES_EACH}),
        ("an eighth", {"kind": "mixed", "bytes": max(setting.size // 8, 32 * MIB)}),
        ("all", {"kind": "mixed", "bytes": setting.size}),
    ]
    setting.say("memory beyond the tensors")
    for name, tensors in subjects:
        setting.settle()
        setting.worker.ask("tensors", **tensors)
        setting.worker.ask("context")
        extra[name] = float(save(setting).details["extra_bytes"]) / MIB
    outcome.facts["extra_mib"] = extra
    most = max(extra, key=lambda name: extra[name])
    outcome.figures.append(
        Figure("save_extra_mib", extra[most], "<=", 64, f"MiB; the most was with {most}")
    )


def measure_many(setting: Setting, outcome: Outcome) -> None:
    size = MANY * MANY_BYTES_EACH
    rounds = setting.rounds * MANY_ROUNDS_PER_ROUND
    setting.say(f"{MANY} tensors of 4 KiB: {rounds} rounds")
    setting.worker.ask("tensors", kind="equal", count=MANY, each=MANY_BYTES_EACH)
    setting.worker.ask("context")
    setting.settle()
    save(setting)
    plain = "one write() + fsync"
    samples = setting.compare(
        {
            OURS: partial(save, setting),
            plain: partial(write_and_fsync, setting, size, size, packed=True),
        },
        rounds,
        setting.settle,
    )
    outcome.samples["many"] = samples
    outcome.facts["many"] = {"last_save": samples[OURS][-1].details}
    outcome.figures.append(speed_figure("many_small_vs_write_fsync", 0.8, samples, OURS, plain))


def measure_tiny(setting: Setting, outcome: Outcome) -> None:
    """Measure saves that replace an existing file.

    No pause separates the saves, as in a real program.
    """
    rounds = setting.rounds * TINY_ROUNDS_PER_ROUND
    setting.say(f"one tensor of 1 KiB: {rounds} rounds")
    setting.worker.ask("tensors", kind="equal", count=1, each=TINY_BYTES)
    setting.worker.ask("context")
    setting.settle()
    size = int(float(save(setting).details["file_bytes"]))
    dance(setting, size)
    plain = "write + fsync + rename + fsync"
    samples = setting.compare(
        {OURS: partial(save, setting), plain: partial(dance, setting, size)},
        rounds,
        lambda: None,
    )
    outcome.samples["tiny"] = samples
    outcome.facts["tiny"] = {"file_bytes": size, "last_save": samples[OURS][-1].details}
    outcome.figures.append(time_figure("tiny_vs_rename_dance", 1.5, samples, OURS, plain))


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    measure_large(setting, outcome)
    measure_many(setting, outcome)
    measure_tiny(setting, outcome)
    measure_extra_memory(setting, outcome)
    return outcome
