# SPDX-License-Identifier: Apache-2.0
"""Measure many small saves, as in preprocessing scripts that were not written for durable saves."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from .rounds import Sample
from .setting import Outcome, Setting, time_figure

COUNT = 1000
VALUES = 1024  # float32 values in each file: 4 KiB

PROGRAM = f"""\
import sys
import time

import torch

torch.save(torch.zeros(1), sys.argv[1] + "/first.pt")
print(time.time(), flush=True)
tensors = [torch.full(({VALUES},), float(number)) for number in range({COUNT})]
for number, tensor in enumerate(tensors):
    torch.save(tensor, sys.argv[1] + f"/{{number:04}}.pt")
"""


def save_all(
    setting: Setting, *command: str, prelude: str = "", variables: Mapping[str, str] = os.environ
) -> Sample:
    """Time from the first save to the end of the process, which waits for background saves."""
    folder = setting.folder / "small"
    folder.mkdir()
    program = Path(setting.folder, "program.py")
    program.write_text(prelude + PROGRAM, encoding="utf-8")
    environment = {k: v for k, v in variables.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *command, str(program), str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    seconds = time.time() - float(done.stdout)
    names = len(list(folder.iterdir()))
    assert names == COUNT + 1, f"{names} files"
    shutil.rmtree(folder)
    program.unlink()
    return Sample(seconds, COUNT * VALUES * 4)


def measure(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"{COUNT} files of {VALUES * 4 >> 10} KiB: {setting.rounds} rounds")
    runs = {
        "torch.save": partial(save_all, setting),
        "ioshape run": partial(save_all, setting, "-m", "ioshape", "run"),
    }
    samples = setting.compare(runs, setting.rounds, setting.rest)
    outcome.samples["small"] = samples
    remark = ", until the process has ended"
    outcome.figures.append(
        time_figure("small_save_vs_torch_run", 2, samples, "ioshape run", "torch.save", remark)
    )
