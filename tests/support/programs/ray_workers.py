# SPDX-License-Identifier: Apache-2.0
"""Two workers of Ray Train, in the current folder: ray_workers.py killed|unchanged."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ioshape
import ray
import torch
from ray import train
from ray.train import (
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer

STEPS = 5


def killed(config: dict[str, Any]) -> None:
    """End both workers in the third step, after the save and before Ray knows about it."""
    run = train.get_context().get_storage().experiment_fs_path
    rank = train.get_context().get_world_rank()
    state = {"weight": torch.zeros(300_000) + rank, "step": 0}
    begins_again = ioshape.latest(run) is not None
    if begins_again:
        state = ioshape.load_group(run)
    Path(config["notes"], f"{os.getpid()}").write_text(f"{rank} {state['step']}")
    for step in range(state["step"] + 1, STEPS + 1):
        state = {"weight": state["weight"] + 1, "step": step}
        ioshape.save_group(state, run, step)
        if step == 3 and not begins_again:
            os._exit(9)
        train.report(
            {"step": step},
            train.Checkpoint(f"{run}/step-{step:010}"),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )


def unchanged(_config: dict[str, Any]) -> None:
    """Run a program that does not mention ioshape; Ray copies what it has saved."""
    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"weight": torch.ones(300_000)}, Path(folder, f"rank-{rank}.pt"))
        train.report({"step": 1}, train.Checkpoint.from_directory(folder))


def main() -> None:
    loop = {"killed": killed, "unchanged": unchanged}[sys.argv[1]]
    Path("notes").mkdir()
    ray.init(num_cpus=2, include_dashstore=False)
    result = TorchTrainer(
        loop,
        train_loop_config={"notes": str(Path("notes").resolve())},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run",
            storage_path=str(Path("saved").resolve()),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    Path("result").write_text(f"{result.checkpoint.path} {result.metrics['step']}")


if __name__ == "__main__":
    main()
