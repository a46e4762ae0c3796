# SPDX-License-Identifier: Apache-2.0
"""Lightning's trainer, killed at random times; a process without ioshape judges the results.

Run as a program: lightning_kills.py FOLDER KILLS SEED. It exits with 0 if every visible checkpoint
loads and has the weights of its step, and none is older than what was reported as saved.
"""

from __future__ import annotations

import collections
import os
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from killed_job import Job
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

WIDTH = 128


class _Model(lightning.LightningModule):
    """A model whose weights all equal the number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: torch.Tensor, _number: int) -> torch.Tensor:
        step = float(self.global_step + 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(step)
        self.log("newest", step)
        result: torch.Tensor = self.layer(batch).mean()
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


class _Telling(ModelCheckpoint):
    """A callback that reports finished saves. Background saves are reported one save later."""

    def __init__(self, folder: Path, told: int, io: Any, behind: int) -> None:
        super().__init__(
            folder,
            "{step}",
            "newest",
            mode="max",
            save_top_k=2,
            save_last=True,
            every_n_train_steps=1,
        )
        self._told, self._io, self._behind = told, io, behind
        self._begun: collections.deque[tuple[str, int]] = collections.deque()

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._begun.append((filepath, trainer.global_step))
        while len(self._begun) > self._behind:
            path, step = self._begun.popleft()
            self._io._settle(path)
            name = "last" if Path(path).name == "last.ckpt" else "step"
            os.write(self._told, f"{name} {step}\n".encode())


def _train_for_ever(folder: Path, told: int, *, in_background: bool) -> None:
    import ioshape.lightning as ours  # noqa: PLC0415 - not in the process that judges

    io = (ours.IoshapeAsyncCheckpointIO if in_background else ours.IoshapeCheckpointIO)()
    trainer = lightning.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[io],
        callbacks=[_Telling(folder, told, io, 2 if in_background else 0)],
    )
    last = folder / "last.ckpt"
    rows: Any = torch.ones(64, WIDTH)
    data: Any = DataLoader(rows, batch_size=8)
    trainer.fit(_Model(), data, ckpt_path=last if last.exists() else None, weights_only=False)


def _step_of(path: Path) -> int:
    found = torch.load(path, weights_only=False)
    step = int(found["global_step"])
    for name, value in found["state_dict"].items():
        if not bool((value == step).all()):
            raise SystemExit(f"{path.name} has {name} of another step than {step}")
    return step


def _judge(folder: Path, said: dict[str, int]) -> None:
    steps = {path.name: _step_of(path) for path in folder.glob("[!.]*.ckpt")}
    found = {"last": steps.pop("last.ckpt", -1), "step": max(steps.values(), default=-1)}
    for name, step in steps.items():
        # Lightning adds "-v1" if a checkpoint of this step exists when a resumed training reaches
        # the step.
        if not re.fullmatch(rf"step={step}(-v\d+)?\.ckpt", name):
            raise SystemExit(f"{name} is of step {step}")
    for name, saved in said.items():
        if found[name] < saved:
            raise SystemExit(f"{name} is of {found[name]}, and {saved} was saved")


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for _ in range(kills):
        in_background = chance.random() < 0.5

        def body(_rank: int, told: int, in_background: bool = in_background) -> None:
            _train_for_ever(folder / "runs", told, in_background=in_background)

        _judge(folder / "runs", Job(1, body).kill(chance, 0.5, 4))


if __name__ == "__main__":
    main()
