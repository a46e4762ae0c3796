# SPDX-License-Identifier: Apache-2.0
"""Four ranks save FSDP2's state by DCP and are killed at random times; stock DCP judges the
results.

They write a file for each rank, or one for all. Run as a program: dcp_kills.py FOLDER KILLS SEED.
It exits with 0 if these hold:

- Every visible checkpoint loads completely.
- None is older than what was reported as saved.
- The save after the last kill leaves no other files.

The process that judges does not import ioshape.
"""

import multiprocessing
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # fully_shard() would, in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from killed_job import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 4
WIDTH = 301  # not a multiple of the ranks


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH))


# ---- Ranks that are killed -----------------------------------------------------------------------


def _save(folder: Path, model: nn.Module, step: int, told: int, *, in_background: bool) -> None:
    """Save to a path that is replaced each time, and to a new one."""
    import ioshape.dcp  # noqa: PLC0415 - not where stock DCP judges

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    for name in ("latest", f"step-{step}"):
        state = {"model": model.state_dict(), "step": step}
        writer = ioshape.dcp.Writer(folder / name)
        if in_background:
            future: Any = dcp.async_save(state, storage_writer=writer)
            future.result()
        else:
            dcp.save(state, storage_writer=writer)
        if dist.get_rank() == 0:
            os.write(told, f"{name} {step}\n".encode())


def _rank(rank: int, store: Path, folder: Path, steps: range, told: int, how: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = _model()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    for step in steps:
        _save(folder, model, step, told, in_background=how)


def _job(store: Path, folder: Path, steps: range, *, in_background: bool, mode: str) -> Job:
    def body(rank: int, told: int) -> None:
        os.environ["IOSHAPE_MODE"] = mode
        _rank(rank, store, folder, steps, told, in_background)

    return Job(RANKS, body)


def _kill_one(store: Path, folder: Path, first: int, chance: random.Random) -> dict[str, int]:
    """Start a job and kill its ranks: some, and the others a moment later.

    Return the steps that rank 0 reported as saved.
    """
    steps = range(first, sys.maxsize)
    in_background, mode = chance.random() < 0.5, chance.choice(("each", "node"))
    job = _job(store, folder, steps, in_background=in_background, mode=mode)
    return job.kill(chance, 0.2)


# ---- The process that judges ---------------------------------------------------------------------


def _loaded_step(path: Path) -> int:
    model = {name: torch.zeros_like(value) for name, value in _model().state_dict().items()}
    state: dict[str, Any] = {"model": model, "step": -1}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for name, value in state["model"].items():
        if not bool((value == state["step"]).all()):
            raise SystemExit(f"{path.name} has {name} of another step than {state['step']}")
    return int(state["step"])


def _judge(folder: Path, said: dict[str, int]) -> int:
    """Check the checkpoints. Return the step at which the next job starts."""
    for name, saved in said.items():
        if _loaded_step(folder / name) < saved:
            raise SystemExit(f"{name} is older than step {saved}, which was saved")
    seen = [path for path in folder.iterdir() if not path.name.startswith(".")]
    step = max(_loaded_step(path) for path in seen) + 1
    for path in folder.glob("step-*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    return step


class _Judge:
    """A process that was forked before ioshape was imported."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        context.Process(target=_Judge._judge_for_ever, args=(theirs, folder), daemon=True).start()

    @staticmethod
    def _judge_for_ever(connection: Any, folder: Path) -> None:
        while True:
            said = connection.recv()
            try:
                connection.send(_judge(folder, said))
            except BaseException as error:  # DCP's exceptions are not derived from Exception
                connection.send(" ".join(f"{type(error).__name__}: {error}".split()))

    def step_after(self, said: dict[str, int]) -> int:
        self._ours.send(said)
        found = self._ours.recv()
        if not isinstance(found, int):
            raise SystemExit(found)
        return found


def _save_once(store: Path, folder: Path, step: int) -> None:
    job = _job(store, folder, range(step, step + 1), in_background=False, mode="node")
    job.told.read()
    if any(job.wait()):
        raise SystemExit("the save after the last kill fails")
    hidden = [path.name for path in [*folder.glob(".*"), *folder.glob("*/.*")]]
    if left := [name for name in hidden if name != ".metadata"]:
        raise SystemExit(f"the save after the last kill leaves {left[0]} behind")
    if len(list((folder / "latest").iterdir())) != 2:  # one for all ranks, and .metadata
        raise SystemExit("the save after the last kill leaves files of others behind")


def main() -> None:
    work, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = work / "run"
    folder.mkdir()
    judge, step = _Judge(folder), 0
    import ioshape.dcp  # noqa: F401, PLC0415 - once for all that are forked from here on

    for number in range(kills):
        step = judge.step_after(_kill_one(work / f"store-{number}", folder, step, chance))
    _save_once(work / "store", folder, step)


if __name__ == "__main__":
    main()
