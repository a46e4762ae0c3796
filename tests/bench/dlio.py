# SPDX-License-Identifier: Apache-2.0
"""Compare torch.save and ioshape in DLIO's checkpoint workload.

DLIO has a setting `fsync` that newer versions read into one field while saving reads another one.
So a baseline that looks durable is not. Neither side relies on the setting here: both sync each
file before it counts as saved.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from .cache import evict, require_cold
from .rounds import Sample, median_gb_per_s, speed_ratio
from .setting import Figure, Outcome, Setting
from .worker import Worker

OURS, THEIRS = "ioshape", "torch"

#: The packages that DLIO's checkpoints need, with the dependencies that they import. The other
#: dependencies of DLIO, TensorFlow and DALI, are left out.
PACKAGES = (
    "dlio-benchmark==2.0.0",
    "pydftracer==1.0.2",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3",
    "PyYAML==6.0.2",
    "mpi4py==4.1.0",
    "psutil==7.0.0",
)


class DlioError(Exception):
    """DLIO could not be installed."""


def install(folder: Path) -> None:
    """Install DLIO once, in a folder that only this benchmark uses."""
    if (folder / "dlio_benchmark").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    if subprocess.run([*command, str(folder), *PACKAGES], check=False).returncode:
        raise DlioError(f"{', '.join(PACKAGES)} cannot be installed")
    # DLIO's package "tests" would hide the one of this repository.
    shutil.rmtree(folder / "tests", ignore_errors=True)


def save(worker: Worker, way: str) -> Sample:
    answer = worker.ask("save", way=way)
    return Sample(float(answer["seconds"]), float(answer["bytes"]))


def load(setting: Setting, worker: Worker, way: str, n_bytes: float) -> Sample:
    files = list(setting.folder.iterdir())
    for file in files:
        evict(file)
    require_cold(setting, files)
    return Sample(float(worker.ask("load", way=way)["seconds"]), n_bytes)


def compared(outcome: Outcome, name: str, target: float) -> None:
    samples = outcome.samples[f"dlio {name}"]
    ours, theirs = (median_gb_per_s(samples[way]) for way in (OURS, THEIRS))
    outcome.figures.append(
        Figure(
            f"dlio_{name}_ratio",
            speed_ratio(samples[OURS], samples[THEIRS]),
            ">=",
            target,
            f"{ours:.2f} to {theirs:.2f} GB/s of torch, both durable",
        )
    )


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    packages = Path("build/dlio").resolve()
    setting.say("installing DLIO")
    install(packages)
    paths = [str(packages), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # DLIO's tensors are zeros and never change.
        "IOSHAPE_UNCHANGED": "ignore",
    }
    command = (sys.executable, "-m", f"{__package__}.dlio_process")
    with Worker(*command, environment=variables) as worker:
        share = worker.ask("make", size=setting.size, folder=setting.folder)["share"]
        outcome.facts["dlio"] = {
            "workload": "megatron_deepspeed",
            "share": share,
            "packages": PACKAGES,
            "ranks": 1,
        }
        setting.say(f"megatron_deepspeed of DLIO, {float(share):.0%} of a rank's bytes")
        saves = {way: partial(save, worker, way) for way in (OURS, THEIRS)}
        outcome.samples["dlio save"] = setting.compare(saves, setting.rounds, setting.settle)
        n_bytes = save(worker, THEIRS).bytes
        loads = {way: partial(load, setting, worker, way, n_bytes) for way in (OURS, THEIRS)}
        outcome.samples["dlio load"] = setting.compare(loads, setting.rounds, setting.rest)
    compared(outcome, "save", 2)
    compared(outcome, "load", 1.3)
    return outcome
