# SPDX-License-Identifier: Apache-2.0
"""Measure the work of the processor in saves and loads, with an engine that moves no byte."""

import json
import subprocess
from collections import defaultdict
from statistics import median

from .rounds import GB
from .setting import Figure, Outcome, Setting
from .slots_turns import programs
from .worker import WorkerError

Answer = dict[str, float]


def run(setting: Setting) -> dict[str, list[Answer]]:
    """Save and load in each way in turn, and return the answers of bench-nil by way."""
    program = programs(setting) / "bench-nil"
    done = subprocess.run(
        [program, str(setting.size), setting.folder, str(setting.rounds)],
        check=False,
        capture_output=True,
        text=True,
    )
    ways = defaultdict(list)
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"bench-nil: {answer['error']}")
        ways[answer["way"]].append(answer)
    if done.returncode:
        raise WorkerError(f"bench-nil ended with status {done.returncode}")
    return ways


def cpu_s_per_gb(answers: list[Answer]) -> float:
    return min(one["cpu_seconds"] / one["tensor_bytes"] for one in answers) * GB


def gb_per_s(answers: list[Answer]) -> float:
    """Return the best speed: other programs on the machine only make a save slower."""
    return max(one["tensor_bytes"] / one["seconds"] for one in answers) / GB


def borrowed_share(answers: list[Answer]) -> float:
    return median(one["borrowed_bytes"] / one["tensor_bytes"] for one in answers)


def describe(answers: list[Answer]) -> str:
    return (
        f"{cpu_s_per_gb(answers):.3f} CPU seconds per GB, {gb_per_s(answers):.1f} GB/s, "
        f"{borrowed_share(answers):.1%} not copied"
    )


def scaling(
    name: str, ways: dict[str, list[Answer]], all_cores: str, one: str, what: str
) -> Figure:
    """Return the figure that compares the speed on all cores with that on one."""
    many, few = gb_per_s(ways[all_cores]), gb_per_s(ways[one])
    what += f", all cores to one: {many:.1f} to {few:.1f} GB/s"
    return Figure(name, many / few, ">=", 1.8, what)


def measure(setting: Setting) -> Outcome:
    setting.say(f"{setting.size / GB:.2f} GB of mixed tensors without storage")
    ways = run(setting)
    borrowed = ways["borrowed_examined"]
    outcome = Outcome()
    outcome.facts["nil"] = dict(ways)
    outcome.figures = [
        Figure(
            "nil_save_gbs_per_core",
            1 / cpu_s_per_gb(ways["copied"]),
            ">=",
            10,
            f"GB per CPU second, copy and checksum: {describe(ways['copied'])}",
        ),
        scaling("nil_save_scaling", ways, "examined_by_all", "examined", "saves with examination"),
        scaling(
            "nil_borrowed_scaling",
            ways,
            "borrowed_examined_by_all",
            "borrowed_examined",
            "saves with examination, without copies",
        ),
        scaling(
            "nil_staged_scaling",
            ways,
            "staged_examined_by_all",
            "staged_examined",
            "writing of background saves",
        ),
        scaling("nil_load_scaling", ways, "loaded_by_all", "loaded", "direct loads"),
        scaling(
            "nil_two_threads_ceiling",
            ways,
            "ceiling_two",
            "ceiling_one",
            "examination, copy and checksum by two threads that share nothing",
        ),
        Figure("zero_copy_share", borrowed_share(borrowed), ">=", 0.98, describe(borrowed)),
        Figure(
            "zero_copy_cpu_s_per_gb",
            cpu_s_per_gb(ways["borrowed"]),
            "<=",
            0.03,
            f"checksum only: {describe(ways['borrowed'])}",
        ),
    ]
    return outcome
