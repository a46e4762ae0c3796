# SPDX-License-Identifier: Apache-2.0
"""Save checkpoints of a framework in two ways, by the protocol of torch_process.py."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .torch_process import serve
from .worker import Answer

STEPS = 10


def tensors(size: str) -> dict[str, Any]:
    """Return a state of eight large tensors."""
    count = 8
    return {f"{number}": torch.rand(int(size) // 4 // count) for number in range(count)}


class Lightning:
    """Lightning's plug-in and ioshape's, both with background saves."""

    def __init__(self) -> None:
        from ioshape.lightning import IoshapeAsyncCheckpointIO  # noqa: PLC0415
        from lightning.pytorch.plugins.io import (  # noqa: PLC0415
            AsyncCheckpointIO,
            TorchCheckpointIO,
        )

        self.ways: dict[str, Any] = {
            "ioshape": IoshapeAsyncCheckpointIO(),
            "stock": AsyncCheckpointIO(TorchCheckpointIO()),
        }

    def make(self, size: str) -> None:
        self.state = tensors(size)

    def save(self, way: str, path: str) -> None:
        self.ways[way].save_checkpoint(self.state, f"{path}.ckpt")

    def settle(self, way: str) -> None:
        self.ways[way].teardown()


class DeepSpeed:
    """DeepSpeed's default engine, which blocks, and ioshape's in the background.

    DeepSpeed's background engine needs a compiler.
    """

    def make(self, size: str) -> None:
        import deepspeed  # noqa: PLC0415
        from ioshape.deepspeed import CheckpointEngine  # noqa: PLC0415

        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
        meet = f"file:///tmp/ioshape-bench-{os.getpid()}"
        deepspeed.init_distributed("gloo", False, init_method=meet, rank=0, world_size=1)
        side = int((int(size) / 12) ** 0.5)  # for each weight there are two moments
        model = torch.nn.Linear(side, side, bias=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        }
        parameters = model.parameters()
        made = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        self.engine = made[0]
        self.engine.backward(self.engine(torch.ones(1, side)).square().mean())
        self.engine.step()
        self.ways = {
            "ioshape": CheckpointEngine(background=True),
            "stock": self.engine.checkpoint_engine,
        }

    def save(self, way: str, path: str) -> None:
        self.engine.checkpoint_engine = self.ways[way]
        self.engine.save_checkpoint(path)

    def settle(self, way: str) -> None:
        self.ways[way].cleanup()


class Trainer:
    """The Trainer of Hugging Face, whose saves block, and ioshape's with background saves."""

    def make(self, size: str) -> None:
        from ioshape.transformers import IoshapeAsyncTrainer  # noqa: PLC0415
        from transformers import (  # noqa: PLC0415
            LlamaConfig,
            LlamaForCausalLM,
            Trainer,
            TrainingArguments,
        )

        # There are two layers with 16 weights for each pair of neurons, and two moments for each
        # weight.
        width = max(1, int((int(size) / (2 * 16 * 12)) ** 0.5) // 64) * 64
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=2,
            num_attention_heads=width // 64,
        )
        model = LlamaForCausalLM(config)
        arguments = TrainingArguments(
            output_dir="unused", use_cpu=True, report_to=[], disable_tqdm=True
        )
        self.ways: dict[str, Any] = {
            "ioshape": IoshapeAsyncTrainer(model=model, args=arguments),
            "stock": Trainer(model=model, args=arguments),
        }
        stock = self.ways["stock"]
        stock.create_optimizer_and_scheduler(num_training_steps=10)
        ids = torch.arange(16).reshape(2, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        stock.optimizer.step()
        self.ways["ioshape"].optimizer = stock.optimizer
        self.ways["ioshape"].lr_scheduler = stock.lr_scheduler

    def save(self, way: str, path: str) -> None:
        trainer = self.ways[way]
        trainer.args.output_dir = path
        trainer._save_checkpoint(trainer.model, None)

    def settle(self, _way: str) -> None:
        from ioshape._integrations.huggingface.whole import wait_for_checkpoints  # noqa: PLC0415

        wait_for_checkpoints()


class Training:
    """Training steps that take constant time if no other work slows them down."""

    def __init__(self, framework: Any) -> None:
        self.framework = framework
        self.matrix = torch.rand(512, 512)
        torch.set_num_threads(1)

    def _steps(self) -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            for _ in range(4):
                torch.mm(self.matrix, self.matrix)
        return time.perf_counter() - begin

    def make(self, size: str) -> Answer:
        self.framework.make(size)
        return {}

    def save(self, way: str, folder: str) -> Answer:
        """Measure what training loses: the call, and slower steps until the files are complete."""
        alone = min(self._steps() for _ in range(3))
        begin = time.perf_counter()
        self.framework.save(way, str(Path(folder) / way))
        lost = time.perf_counter() - begin
        lost += max(0.0, self._steps() - alone)
        self.framework.settle(way)
        return {"seconds": lost}


if __name__ == "__main__":
    frameworks = {"lightning": Lightning, "trainer": Trainer, "deepspeed": DeepSpeed}
    serve(Training(frameworks[sys.argv[1]]()))
