# SPDX-License-Identifier: Apache-2.0
"""Processes that save checkpoints of DCP, killed at random moments; stock DCP judges the rest.

Run as a program: dcp_kills.py FOLDER KILLS SEED. It ends with 0 if every checkpoint that anybody
can see loads whole, and is none that was replaced before. ioshape is in the killed processes alone.
"""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

TENSORS = 5
ELEMENTS = 200_000


def _state(step: int) -> dict[str, Any]:
    tensors = {f"weight{number}": torch.full((ELEMENTS,), step) for number in range(TENSORS)}
    return {"step": step, **tensors}


def _save_for_ever(folder: Path, first: int, told: int) -> None:
    """Always the same path, and now and then one that is new."""
    import ioshape.dcp  # noqa: PLC0415 - not in the process that judges

    for step in range(first, first + 1_000_000):
        for name in ("latest", f"step-{step}"):
            writer = ioshape.dcp.Writer(folder / name)
            dcp.save(_state(step), storage_writer=writer, no_dist=True)
            os.write(told, f"{name} {step}\n".encode())


def _loaded_step(path: Path) -> int:
    state = _state(-1)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    step = int(state["step"])
    for name, value in state.items():
        if name != "step" and not bool((value == step).all()):
            raise SystemExit(f"{path} has {name} of another step than {step}")
    return step


def _kill_one(folder: Path, first: int, after_s: float) -> dict[str, int]:
    """What the process said it had saved."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            _save_for_ever(folder, first, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = [told.readline(), told.readline()]  # it has begun
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        lines += told.readlines()
    _pid, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("it ended by itself")
    return {name: int(step) for name, step in (line.split() for line in lines)}


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    step = 0
    for _ in range(kills):
        said = _kill_one(folder, step, chance.random() * 0.2)
        for name, saved in said.items():
            if _loaded_step(folder / name) < saved:
                raise SystemExit(f"{name} is older than {saved}, which was saved")
        for path in folder.iterdir():
            if not path.name.startswith("."):
                step = max(step, _loaded_step(path) + 1)
        for path in folder.glob("step-*"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    hidden = [path.name for path in [*folder.glob(".*"), *folder.glob("*/.*")]]
    print(len([name for name in hidden if name != ".metadata"]))  # of the last one, at most two


if __name__ == "__main__":
    main()
