# SPDX-License-Identifier: Apache-2.0
"""Measure what examining costs a save, how fast `ioshape diff --exact` is, and what alarms find."""

import json
import re
import subprocess
import sys
import time
from statistics import median

from tree import ROOT

from .rounds import GB, Sample, Samples, time_ratio
from .setting import Figure, Outcome, Setting

WITH, WITHOUT = "unchanged=off", "off"  # values of the setting `examine`
DTYPES = ("float32", "bfloat16")
BUGS, TRAININGS = 10, 105
TESTS = ROOT / "tests" / "python" / "save"
#: writes two files that differ in one tensor
TWO_FILES = """
import sys, ioshape, torch
one, other, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
state = {f"layer{i}": torch.randn(count) for i in range(8)}
ioshape.save(state, one)
state["layer3"][:1000] += 1
ioshape.save(state, other)
"""


def measure_saves(setting: Setting, dtype: str) -> Samples:
    """Compare saves with statistics and without."""
    arguments = [setting.folder / "state.pt", setting.size, setting.rounds, dtype]
    shown = subprocess.run(
        [sys.executable, "-m", "tests.bench.examine_process", *map(str, arguments)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return {way: [Sample(**sample) for sample in found] for way, found in json.loads(shown).items()}


def detail_ratio(samples: Samples, name: str) -> float:
    pairs = zip(samples[WITH], samples[WITHOUT], strict=True)
    return median(float(a.details[name]) / float(b.details[name]) for a, b in pairs)


def added_cpu_s(samples: Samples) -> float:
    """Return the processor seconds per GB that examining adds."""
    pairs = zip(samples[WITH], samples[WITHOUT], strict=True)
    return median(
        (float(a.details["cpu_s"]) - float(b.details["cpu_s"])) / (a.bytes / GB) for a, b in pairs
    )


def diff_gb_per_s(setting: Setting) -> float:
    """Return how fast two cached files that differ in one tensor are compared exactly."""
    one, other = setting.folder / "one.pt", setting.folder / "other.pt"
    arguments = [str(one), str(other), str(setting.size // 4 // 8)]
    subprocess.run([sys.executable, "-c", TWO_FILES, *arguments], check=True)
    seconds = []
    for path in (one, other):
        path.read_bytes()
    for _ in range(setting.rounds):
        begin = time.perf_counter()
        command = ["-m", "ioshape", "diff", "--exact", str(one), str(other)]
        subprocess.run([sys.executable, *command], check=False, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begin)
    return 2 * setting.size / GB / median(seconds)


def passed(file: str, pattern: str) -> int:
    """Run a file of tests, and return how many of those that match have passed."""
    command = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(TESTS / file)]
    shown = subprocess.run(
        [sys.executable, *command], cwd=ROOT, check=False, capture_output=True, text=True
    ).stdout
    return len(re.findall(rf"^PASSED \S+::{pattern}", shown, re.MULTILINE))


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    for dtype in DTYPES:
        setting.say(f"saves of {setting.size / GB:.1f} GB, {dtype}")
        outcome.samples[dtype] = measure_saves(setting, dtype)
    all_samples = list(outcome.samples.values())
    setting.settle()
    setting.say("comparing two files exactly")
    diff = diff_gb_per_s(setting)
    setting.settle()
    setting.say("published bugs and healthy trainings")
    bugs = passed("test_examined_bugs.py", r"\S+")
    healthy = passed("test_examined_healthy.py", "test_a_healthy_training")
    ratio = min(1 / time_ratio(one[WITH], one[WITHOUT]) for one in all_samples)
    stall = max(detail_ratio(one, "stall_s") for one in all_samples)
    outcome.figures += [
        Figure("examine_save_ratio", ratio, ">=", 0.97, "durable saves with and without"),
        Figure(
            "examine_cpu_s_per_gb",
            max(map(added_cpu_s, all_samples)),
            "<=",
            0.05,
            "added processor seconds; float32 and bfloat16, worst",
        ),
        Figure("examine_stall_ratio", stall, "<=", 1.02, "calls of save_async()"),
        Figure("bugs_caught", bugs, ">=", BUGS, "tests of test_examined_bugs.py"),
        Figure(
            "false_alarms",
            max(TRAININGS - healthy, 0),
            "<=",
            0,
            f"{healthy} healthy trainings were silent",
        ),
        Figure("diff_gbs", diff, ">=", 3, "bytes of both files, in the page cache"),
    ]
    return outcome
