# SPDX-License-Identifier: Apache-2.0
"""Measure one writer for the ranks of a node: its speed, a rank's stall, copies of each byte."""

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from .gather_ranks import Ranks, all_of, c_ranks, one_of, open_groups
from .rounds import GB, Sample, interleave, median_gb_per_s, median_seconds, time_ratio
from .setting import Figure, Outcome, Setting, speed_figure
from .slots_turns import programs
from .worker import Worker

MIB = 1 << 20

RANKS = 8
# The second comparison has few ranks, because on a real node each rank has at least one core.
FEW_RANKS = 2
STAGING_SLACK = 64 * MIB

# The context takes no slots. Their cost is measured in another benchmark.
OPEN = {"IOSHAPE_COORDINATOR": "open"}

OURS = "node mode"
SINGLE = "one process"
PLAIN = "memcpy"

# Each save has its own step number.
steps = itertools.count(1)


def settle(setting: Setting, directory: Path) -> None:
    """Remove all files but the directory, where ranks meet, and wait for the storage."""
    for path in [*setting.folder.iterdir(), *directory.glob("step-*")]:
        if path.is_dir() and path != directory:
            shutil.rmtree(path)
        elif path != directory:
            path.unlink()
    setting.rest()


def save(ranks: Ranks) -> Sample:
    return all_of(ranks.together("group_save", step=next(steps)), ranks.tensor_bytes)


def stage(ranks: Ranks) -> Sample:
    """Return a sample of the call. A detail is the time until the checkpoint is complete."""
    staged = one_of(ranks.together("group_async", step=next(steps)), ranks.tensor_bytes)
    durable = ranks.each("wait")
    details = {
        **durable[0],
        **staged.details,
        "durable_s": max(float(one["seconds"]) for one in durable),
    }
    return Sample(staged.seconds, staged.bytes, details)


def copy(ranks: Ranks) -> Sample:
    return one_of(ranks.together("memcpy"), ranks.tensor_bytes)


def save_alone(setting: Setting, worker: Worker) -> Sample:
    answer = worker.ask("save", path=setting.folder / "single.pt")
    return Sample(float(answer["seconds"]), float(answer["tensor_bytes"]), answer)


def prepare(ranks: Ranks, bytes_each: int, directory: Path) -> None:
    ranks.make_tensors(kind="mixed", bytes=bytes_each)
    ranks.each("context", staging=bytes_each + STAGING_SLACK, **OPEN)
    open_groups(ranks, directory, "node", store="host")


# ---- Figures ------------------------------------------------------------------------------------


def measure_speed(setting: Setting, outcome: Outcome, ranks: Ranks, directory: Path) -> None:
    setting.say(f"{RANKS} ranks, {ranks.tensor_bytes / GB:.2f} GB in all: {setting.rounds} rounds")
    with Worker(programs(setting) / "bench-worker") as single:
        single.ask("tensors", kind="mixed", bytes=int(ranks.tensor_bytes))
        single.ask("context", **OPEN)
        settle(setting, directory)
        save(ranks)
        save_alone(setting, single)
        samples = setting.compare(
            {OURS: partial(save, ranks), SINGLE: partial(save_alone, setting, single)},
            setting.rounds,
            partial(settle, setting, directory),
        )
    ours = samples[OURS]
    outcome.samples["node, durable"] = samples
    outcome.facts["node"] = {"ranks": RANKS, "bytes": ranks.tensor_bytes, "last": ours[-1].details}
    outcome.ceilings.append(
        f"one process that saves the same bytes: {median_gb_per_s(samples[SINGLE]):.2f} GB/s"
    )
    parts = " + ".join(
        f"{part} {median(float(one.details[part + '_s']) for one in ours):.3f}"
        for part in ("write", "sync", "commit", "group")
    )
    remark = f"; rank 0, seconds: {parts}"
    outcome.figures.append(speed_figure("node_vs_single", 0.95, samples, OURS, SINGLE, remark))


def compare_stalls(
    setting: Setting, outcome: Outcome, ranks: Ranks, directory: Path
) -> tuple[float, str]:
    count = len(ranks.workers)
    setting.say(f"{count} ranks stage at once: {setting.rounds} rounds")
    settle(setting, directory)
    first = stage(ranks)
    copy(ranks)
    # Writes during these rounds are the benchmark's own, so foreign I/O is not watched.
    samples = interleave(
        {OURS: partial(stage, ranks), PLAIN: partial(copy, ranks)},
        setting.rounds,
        partial(settle, setting, directory),
    )
    outcome.samples[f"staging, {count} ranks"] = samples
    outcome.facts[f"staging, {count} ranks"] = {
        "first_save_seconds": first.seconds,
        "last": samples[OURS][-1].details,
    }
    ratio = time_ratio(samples[OURS], samples[PLAIN])
    return ratio, (
        f"{median_seconds(samples[OURS]):.3f} s to {median_seconds(samples[PLAIN]):.3f} s, mean of "
        f"{count} ranks at once"
    )


def measure_stall(
    setting: Setting, outcome: Outcome, ranks: Ranks, directory: Path, program: Path
) -> None:
    ratio, remark = compare_stalls(setting, outcome, ranks, directory)
    setting.clear()
    with c_ranks(program, FEW_RANKS) as few:
        prepare(few, setting.size // RANKS, directory)
        few_ratio, few_remark = compare_stalls(setting, outcome, few, directory)
    outcome.figures.append(
        Figure(
            "node_stall_vs_memcpy",
            ratio,
            "<=",
            1.2,
            f"{remark}; {few_ratio:.2f} with a core for each: {few_remark}",
        )
    )


def copies(ranks: Ranks, save_once: Callable[[Ranks], Sample]) -> dict[str, float]:
    """Return how often each byte is copied: in all, by the writer (rank 0) and for another rank."""
    ranks.each("copied")
    done = save_once(ranks)
    counted = ranks.each("copied")
    in_file = 0.0 if float(done.details["direct"]) else 1.0
    memory = [float(one["in_memory"]) for one in counted]
    sockets = sum(float(one["through_sockets"]) for one in counted)
    return {
        "all": (sum(memory) + sockets) / ranks.tensor_bytes + in_file,
        "in_memory": sum(memory) / ranks.tensor_bytes,
        "through_sockets": sockets / ranks.tensor_bytes,
        "into_the_page_cache": in_file,
        "by_the_writer": memory[0] / ranks.tensor_bytes,
        "by_another_rank": memory[1] / (ranks.tensor_bytes / len(memory)),
    }


def measure_copies(setting: Setting, outcome: Outcome, directory: Path) -> None:
    setting.say("copies of each byte, counted")
    found: dict[str, dict[str, float]] = {}
    with c_ranks(programs(setting) / "bench-counter", RANKS) as ranks:
        prepare(ranks, setting.size // RANKS, directory)
        for how, save_once in {"blocking": save, "async": stage}.items():
            save_once(ranks)
            found[how] = copies(ranks, save_once)
    outcome.facts["copies"] = found
    most = max(found, key=lambda how: found[how]["all"])
    outcome.figures.append(
        Figure(
            "node_copies",
            found[most]["all"],
            "<=",
            1.1,
            "; ".join(
                f"{how} {one['all']:.4f} (memory {one['in_memory']:.4f}, sockets "
                f"{one['through_sockets']:.4f}, page cache {one['into_the_page_cache']:.0f})"
                for how, one in found.items()
            ),
        )
    )


def measure(setting: Setting, outcome: Outcome) -> None:
    program = programs(setting) / "bench-worker"
    directory = setting.folder / "checkpoints"
    setting.clear()
    with c_ranks(program, RANKS) as ranks:
        prepare(ranks, setting.size // RANKS, directory)
        measure_speed(setting, outcome, ranks, directory)
        measure_stall(setting, outcome, ranks, directory, program)
    setting.clear()
    measure_copies(setting, outcome, directory)
    setting.clear()
