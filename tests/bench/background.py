# SPDX-License-Identifier: Apache-2.0
"""Measure background saves: how long the call blocks, during which tensors must not change."""

from functools import partial

from .rounds import GB, Sample, median_gb_per_s, median_seconds
from .setting import Outcome, Setting, time_figure

MIB = 1 << 20

# Staging is allocated in chunks. This many extra bytes are enough for all tensors.
STAGING_SLACK = 64 * MIB

OURS = "ioshape"
PLAIN = "memcpy"


def stage(setting: Setting) -> Sample:
    """Return a sample of the call. The time until the file is durable is one of its details."""
    staged = setting.worker.ask("async", path=setting.folder / "ours.pt")
    durable = setting.worker.ask("wait")
    details = {**durable, "cpu_seconds": staged["cpu_seconds"], "durable_s": durable["seconds"]}
    return Sample(float(staged["seconds"]), setting.size, details)


def copy(setting: Setting) -> Sample:
    answer = setting.worker.ask("memcpy")
    return Sample(float(answer["seconds"]), setting.size, answer)


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    setting.say(f"{setting.size / GB:.2f} GB of mixed tensors: {setting.rounds} rounds")
    answer = setting.worker.ask("tensors", kind="mixed", bytes=setting.size)
    setting.worker.ask("context", staging=setting.size + STAGING_SLACK)
    setting.settle()
    first = stage(setting)
    copy(setting)
    samples = setting.compare(
        {OURS: partial(stage, setting), PLAIN: partial(copy, setting)},
        setting.rounds,
        setting.settle,
    )
    ceiling = median_gb_per_s(samples[PLAIN])
    durable = [Sample(float(one.details["durable_s"]), one.bytes) for one in samples[OURS]]
    outcome.samples["staging"] = samples
    outcome.samples["durable"] = {OURS: durable}
    outcome.facts["async"] = {
        "tensors": answer["tensors"],
        "bytes": setting.size,
        "first_save_seconds": first.seconds,
        "first_save": first.details,
        "seconds_until_durable": median_seconds(durable),
        "last_save": samples[OURS][-1].details,
    }
    outcome.ceilings.append(f"memcpy into warm memory, one thread: {ceiling:.2f} GB/s")
    remark = f"; first save {first.seconds:.3f} s; durable after {median_seconds(durable):.3f} s"
    outcome.figures.append(time_figure("async_vs_memcpy", 1.15, samples, OURS, PLAIN, remark))
    return outcome
