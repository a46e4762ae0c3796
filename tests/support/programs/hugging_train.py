# SPDX-License-Identifier: Apache-2.0
"""Trains with Hugging Face's packages, by a script that does not know ioshape.

Run as a program: hugging_train.py HOW FOLDER RANKS STEPS... It imports the packages. For each
STEPS, one after the other, it then forks the ranks, because the imports take longer than their
work.

Each rank prints a list as JSON. It has the number of the rank, the names that another process could
see, and the error that the rank caught. Names are recorded while a checkpoint is saved, and while
an old one is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Seen = dict[str, list[list[str]]]


def visible(folder: Path) -> list[str]:
    """Return the names that a reader takes for checkpoints."""
    return sorted(path.name for path in folder.glob("[!.]*")) if folder.is_dir() else []


def _watch_removals(folder: Path, seen: Seen) -> None:
    remove = shutil.rmtree

    def watched(path: Any, *arguments: Any, **named: Any) -> None:
        if not Path(path).name.startswith("."):
            seen["removing"].append(visible(folder))
        remove(path, *arguments, **named)

    shutil.rmtree = watched  # type: ignore[assignment]


# ---- Trainer ----------------------------------------------------------------------------------


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


def tiny_trainer(folder: Path, steps: int, seen: Seen, base: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    class Watching(base or Trainer):  # type: ignore[misc]
        def _save_rng_state(self, output_dir: str) -> None:
            super()._save_rng_state(output_dir)
            seen["saving"].append(visible(folder))

    given = {
        "max_steps": steps,
        "save_steps": 2,
        "save_total_limit": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    ids = torch.arange(256).reshape(32, 8) % 64
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(output_dir=str(folder), **given)
    return Watching(model=tiny_model(), args=arguments, train_dataset=data, eval_dataset=data[:4])


def train(folder: Path, steps: int, seen: Seen) -> None:
    """Train, from the last checkpoint if there is one."""
    tiny_trainer(folder, steps, seen).train(resume_from_checkpoint=bool(visible(folder)))


def train_with_best(folder: Path, steps: int, seen: Seen) -> None:
    trainer = tiny_trainer(
        folder,
        steps,
        seen,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        save_total_limit=1,
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert Path(best).name == f"checkpoint-{trainer.state.best_global_step}"
    assert Path(best).is_dir()


def train_in_background(folder: Path, steps: int, seen: Seen) -> None:
    """Train with background saves, requested by one line."""
    from ioshape.transformers import IoshapeAsyncTrainer  # noqa: PLC0415

    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    trainer = tiny_trainer(folder, steps, seen, IoshapeAsyncTrainer, **options)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.is_dir()


def train_in_background_and_fail(folder: Path, steps: int, seen: Seen) -> None:
    """Simulate a full disk at a time when training has gone on."""
    from ioshape.transformers import IoshapeAsyncTrainer  # noqa: PLC0415

    class Failing(IoshapeAsyncTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            super()._save_rng_state(output_dir)
            if self.state.global_step == 4 and self.args.process_index == self.args.world_size - 1:
                torch.save(torch.ones(1000), Path(output_dir, "x" * 300))

    tiny_trainer(folder, steps, seen, Failing).train()


def train_and_fail(folder: Path, steps: int, seen: Seen) -> None:
    from transformers import Trainer  # noqa: PLC0415

    class Failing(Trainer):  # type: ignore[misc]
        def _save_rng_state(self, output_dir: str) -> None:
            super()._save_rng_state(output_dir)
            if self.state.global_step == 4 and self.args.process_index == self.args.world_size - 1:
                raise ValueError("one rank has failed")

    tiny_trainer(folder, steps, seen, Failing).train()


# ---- accelerate -------------------------------------------------------------------------------


def _accelerated(**options: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(cpu=True, **options)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def _step(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 8)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def accelerate_named(folder: Path, steps: int, seen: Seen) -> None:
    from accelerate.utils import ProjectConfiguration  # noqa: PLC0415

    configuration = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator, model, optimizer = _accelerated(project_config=configuration)
    accelerator.register_save_state_pre_hook(
        lambda *_: seen["saving"].append(visible(folder / "checkpoints"))
    )
    for number in range(steps):
        _step(accelerator, model, optimizer)
        saved = accelerator.save_state()
        assert Path(saved) == folder / "checkpoints" / f"checkpoint_{number}"
    accelerator.wait_for_everyone()
    accelerator.load_state()


def accelerate_again(folder: Path, steps: int, seen: Seen) -> None:
    """Save to one path each time, in which the user keeps other files."""
    accelerator, model, optimizer = _accelerated()
    for number in range(steps):
        _step(accelerator, model, optimizer)
        accelerator.save_state(folder / "state")
        if accelerator.is_main_process and not number:
            (folder / "state" / "notes.txt").write_text("mine")
        seen["saving"].append(visible(folder / "state"))
        accelerator.load_state(folder / "state")


def accelerate_fsdp(folder: Path, steps: int, seen: Seen) -> None:
    """Simulate GPUs, without which accelerate does not shard models by itself."""
    from accelerate import (  # noqa: PLC0415
        Accelerator,
        FullyShardedDataParallelPlugin,
        PartialState,
    )
    from accelerate.optimizer import AcceleratedOptimizer  # noqa: PLC0415
    from accelerate.utils import DistributedType  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator._models.append(model)
    accelerator._optimizers.append(AcceleratedOptimizer(optimizer))
    for number in range(steps):
        _step(accelerator, model, optimizer)
        before = model[0].weight.full_tensor().clone()
        accelerator.save_state(folder / f"state-{number}")
        seen["saving"].append(visible(folder))
        _step(accelerator, model, optimizer)
        accelerator.load_state(folder / f"state-{number}")
        assert torch.equal(model[0].weight.full_tensor(), before)


# ---- Sets -------------------------------------------------------------------------------------


def sets(folder: Path, _steps: int, _seen: Seen) -> None:
    """Save sets that replace each other and have different files, beside files of the user."""
    from accelerate import Accelerator  # noqa: PLC0415
    from huggingface_hub import save_torch_state_dict  # noqa: PLC0415

    model, path = tiny_model(), folder / "model"
    for size in ("20KB", "50KB", "1GB", "30KB"):
        model.save_pretrained(path, max_shard_size=size)
        (path / "notes.txt").touch()
        weights = {one.name for one in path.glob("model*.safetensors")}
        index = path / "model.safetensors.index.json"
        if size == "1GB":
            assert weights == {"model.safetensors"}
            assert not index.exists()
        else:
            assert weights == set(json.loads(index.read_text())["weight_map"].values())
        loaded = type(model).from_pretrained(path).state_dict()
        assert all(torch.equal(loaded[name], one) for name, one in model.state_dict().items())
    state = {f"layer{number}": torch.full((1000,), float(number)) for number in range(8)}
    for most in (9000, 10**9, 20000):
        save_torch_state_dict(state, folder / "hub", max_shard_size=most)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(torch.nn.Linear(100, 100), folder / "other", "20KB")


HOW: dict[str, Callable[[Path, int, Seen], None]] = {
    "train": train,
    "train_with_best": train_with_best,
    "train_and_fail": train_and_fail,
    "train_in_background": train_in_background,
    "train_in_background_and_fail": train_in_background_and_fail,
    "accelerate_named": accelerate_named,
    "accelerate_again": accelerate_again,
    "accelerate_fsdp": accelerate_fsdp,
    "sets": sets,
}

#: errors that a rank catches and reports
_FAILURES: dict[str, tuple[type[Exception], ...]] = {
    "train_and_fail": (ValueError, OSError),
    "train_in_background_and_fail": (OSError,),
}


def _be_rank(rank: int, ranks: int, how: str, folder: Path, steps: int) -> None:
    if ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in numbers.items()})
    seen: Seen = {"saving": [], "removing": []}
    _watch_removals(folder / "checkpoints" if how == "accelerate_named" else folder, seen)
    error = ""
    try:
        HOW[how](folder, steps, seen)
    except _FAILURES.get(how, ()) as caught:
        error = str(caught)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os.write(1, f"{json.dumps([rank, seen, error])}\n".encode())


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    how, folder, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    import accelerate  # noqa: F401, PLC0415
    import torch._dynamo  # noqa: F401, PLC0415 - accelerate imports it when it saves

    if not how.startswith("accelerate"):
        from transformers import LlamaForCausalLM, Trainer  # noqa: F401, PLC0415
    for steps in map(int, sys.argv[4:]):
        started = []
        for rank in range(ranks):
            started.append(os.fork())
            if not started[rank]:
                _be_rank(rank, ranks, how, folder, steps)
                return
        ended = [os.waitpid(pid, 0)[1] for pid in started]
        if any(ended):
            sys.exit(f"ranks ended with {ended}")


if __name__ == "__main__":
    main()
