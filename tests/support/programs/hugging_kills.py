# SPDX-License-Identifier: Apache-2.0
"""Trainings that are killed at random times; a process without ioshape judges the results.

Run as a program: hugging_kills.py FOLDER KILLS SEED. It exits with 0 if the newest visible
checkpoint has all its files, which load and belong together. It must not be one that was replaced
before. The same is checked of a set of shards that is always saved to one path.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import hugging_train
import torch
from killed_job import Job
from safetensors.torch import load_file

STEPS = 1_000_000
NAMES = {
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


def _train_for_ever(folder: Path, told: int) -> None:
    import ioshape  # noqa: PLC0415 - not in the process that judges

    ioshape.patch(safetensors=True)
    options: dict[str, Any] = {"save_steps": 1, "save_total_limit": 2}
    seen: hugging_train.Seen = {"saving": []}
    trainer = hugging_train.tiny_trainer(folder / "runs", STEPS, seen, **options)
    save = trainer._save_checkpoint

    def save_and_tell(model: Any, trial: Any) -> None:
        save(model, trial)
        number = trainer.state.global_step
        os.write(told, f"step {number}\n".encode())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(number))
        model.save_pretrained(folder / "set", max_shard_size="20KB")
        os.write(told, f"set {number}\n".encode())

    trainer._save_checkpoint = save_and_tell
    trainer.train(resume_from_checkpoint=bool(hugging_train.visible(folder / "runs")))


def _check_checkpoint(folder: Path) -> int:
    """Check the newest checkpoint. Return its step."""
    steps = [int(name.partition("-")[2]) for name in hugging_train.visible(folder)]
    newest = folder / f"checkpoint-{max(steps)}"
    names = {path.name for path in newest.iterdir()}
    if not names >= NAMES:
        raise SystemExit(f"{newest} has no {NAMES - names}")
    if json.loads((newest / "trainer_state.json").read_text())["global_step"] != max(steps):
        raise SystemExit(f"{newest} has the state of another step")
    load_file(newest / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        state = torch.load(newest / name, weights_only=False)
        if name == "scheduler.pt" and state["last_epoch"] != max(steps):
            raise SystemExit(f"{newest / name} is of another step")
    return max(steps)


def _check_set(folder: Path) -> int:
    """Check that all values of the set are one number. Return that number."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name for path in folder.glob("*.safetensors")}
    if files != set(index["weight_map"].values()):
        raise SystemExit(f"{folder} has files of another set")
    found = {
        float(one)
        for name in files
        for value in load_file(folder / name).values()
        for one in value.flatten()
    }
    if len(found) != 1:
        raise SystemExit(f"{folder} has values of {sorted(found)}")
    return int(found.pop())


def main() -> None:
    folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    hugging_train.tiny_trainer(folder / "warm", 1, {"saving": []}, save_steps=5)  # imports all
    for _ in range(kills):
        said = Job(1, lambda _rank, told: _train_for_ever(folder, told)).kill(chance, 0.5)
        found = {"step": _check_checkpoint(folder / "runs"), "set": _check_set(folder / "set")}
        for name, saved in said.items():
            if found[name] < saved:
                raise SystemExit(f"{name} is of {found[name]}, and {saved} was saved")
    hidden = [path.name for path in [*folder.glob(".*"), *folder.glob("runs/.*")]]
    print(len(hidden))  # at most one of each kind, from the last kill
    shutil.rmtree(folder / "warm", ignore_errors=True)


if __name__ == "__main__":
    main()
