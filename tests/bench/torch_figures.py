# SPDX-License-Identifier: Apache-2.0
"""Measure what a user of PyTorch gains from ioshape (`tests/bench.sh torch`)."""

import os
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from statistics import median

from . import load_slice, torch_background, torch_load, torch_save
from .rounds import Sample, median_seconds
from .setting import Figure, Outcome, Setting

IMPORT_ROUNDS = 20


def run_python(setting: Setting, program: str) -> Sample:
    """Run a fresh interpreter from start to end, with compiled modules as in an installation."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, cwd=setting.folder, env=environment)
    return Sample(time.perf_counter() - began, 0)


def measure_import(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"import: {IMPORT_ROUNDS} rounds")
    programs = {
        "pass": "pass",
        "import": "import ioshape, sys; assert 'torch' not in sys.modules",
    }
    runs = {name: partial(run_python, setting, program) for name, program in programs.items()}
    for run in runs.values():
        run()
    samples = setting.compare(runs, IMPORT_ROUNDS, lambda: None)
    outcome.samples["import"] = samples
    outcome.figures.append(
        Figure(
            "import_ms",
            median(
                (with_it.seconds - without.seconds) * 1e3
                for with_it, without in zip(samples["import"], samples["pass"], strict=True)
            ),
            "<=",
            60,
            f"ms above {median_seconds(samples['pass']) * 1e3:.1f} ms of python -c pass",
        )
    )


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["versions"] = {
        name: metadata.version(name) for name in ("ioshape", "torch", "safetensors")
    } | {"python": sys.version.split()[0]}
    torch_save.measure_large(setting, outcome)
    torch_background.measure_stall(setting, outcome)
    torch_background.measure_loop(setting, outcome)
    load_slice.measure(setting, outcome)
    torch_load.measure(setting, outcome)
    torch_save.measure_tiny(setting, outcome)
    measure_import(setting, outcome)
    return outcome
