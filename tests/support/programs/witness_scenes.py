# SPDX-License-Identifier: Apache-2.0
"""Programs of two ranks that do not know ioshape: witness.py watches what they write.

    torchrun … witness_scenes.py SCENE

runs one rank. Checkpoints go to the folder "saved". Each has some megabytes.
"""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # before there is a group, which it would keep until Python ends
from torch import distributed

RANK = int(os.environ["RANK"])
FOLDER = Path("saved")


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    one = model()
    optimizer = torch.optim.AdamW(one.parameters())
    one(torch.ones(4, 256)).square().mean().backward()
    optimizer.step()
    return one, optimizer


def dcp() -> None:
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    one = model()
    fully_shard(one, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": one.state_dict()}, checkpoint_id=FOLDER / "dcp")
    later: Any = dcp.async_save({"model": one.state_dict()}, checkpoint_id=FOLDER / "later")
    later.result()


def opened() -> None:
    """Save to an open file, like DLIO."""
    one, optimizer = trained()
    with (FOLDER / f"rank-{RANK}.pt").open("wb") as file:
        torch.save({"model": one.state_dict(), "optimizer": optimizer.state_dict()}, file)
        os.fsync(file.fileno())


def lightning() -> None:
    from lightning import LightningModule, Trainer  # noqa: PLC0415
    from lightning.pytorch.plugins.io import AsyncCheckpointIO  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    rows: Any = torch.ones(4, 256)
    kinds: list[tuple[str, Any]] = [("plain", []), ("async", [AsyncCheckpointIO()])]
    for name, plugins in kinds:
        trainer = Trainer(
            plugins=plugins,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=FOLDER / name,
        )
        trainer.fit(Module(), DataLoader(rows, batch_size=2))
        trainer.save_checkpoint(FOLDER / name / "last.ckpt")
        trainer.strategy.teardown()


def accelerate() -> None:
    from accelerate import Accelerator  # noqa: PLC0415

    accelerator = Accelerator(cpu=True)
    one, optimizer = accelerator.prepare(*trained())
    accelerator.save_state(str(FOLDER / "state"))
    accelerator.save_model(one, str(FOLDER / "model"))
    accelerator.save_state(str(FOLDER / "pickled"), safe_serialization=False)
    del optimizer


def trainer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=2000, hidden_size=128, intermediate_size=256, num_hidden_layers=2
    )
    arguments = TrainingArguments(
        str(FOLDER), max_steps=2, save_steps=1, use_cpu=True, report_to=[], save_total_limit=1
    )
    rows = [{"input_ids": torch.ones(8).long(), "labels": torch.ones(8).long()}] * 64
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()


def deepspeed() -> None:
    import deepspeed  # noqa: PLC0415

    one = model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "bf16": {"enabled": True},
    }
    engine = deepspeed.initialize(model=one, model_parameters=one.parameters(), config=config)[0]
    engine.backward(engine(torch.ones(2, 256).bfloat16()).float().square().mean())
    engine.step()
    engine.save_checkpoint(str(FOLDER))
    engine.save_16bit_model(str(FOLDER))


def deepspeed_plugin() -> None:
    """Save with accelerate's DeepSpeed plugin."""
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu", LOCAL_SIZE="2")
    from accelerate import Accelerator, DeepSpeedPlugin  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    one = model()
    rows: Any = torch.ones(16, 256)
    prepared = accelerator.prepare(
        one, torch.optim.AdamW(one.parameters()), DataLoader(rows, batch_size=2)
    )
    accelerator.backward(prepared[0](torch.ones(2, 256)).square().mean())
    prepared[1].step()
    accelerator.save_state(str(FOLDER / "state"))
    accelerator.load_state(str(FOLDER / "state"))
    accelerator.end_training()


def sb3() -> None:
    from stable_baselines3 import DQN  # noqa: PLC0415

    one = DQN("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [512, 512]}, buffer_size=50000)
    one.save(FOLDER / f"dqn-{RANK}")
    one.save_replay_buffer(FOLDER / f"replay-{RANK}")
    DQN.load(FOLDER / f"dqn-{RANK}").load_replay_buffer(FOLDER / f"replay-{RANK}")


def composer() -> None:
    from composer import Trainer  # noqa: PLC0415
    from composer.models import ComposerModel  # noqa: PLC0415
    from composer.utils import dist as composer_dist  # noqa: PLC0415
    from torch.utils.data import DataLoader  # noqa: PLC0415

    class Module(ComposerModel):  # type: ignore[misc] # see pyproject
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, batch: Any) -> Any:
            return self.layers(batch)

        def loss(self, outputs: Any, _: Any) -> Any:
            return outputs.square().mean()

    os.environ["NODE_RANK"] = "0"
    rows: Any = torch.ones(16, 256)
    data = DataLoader(rows, batch_size=2, sampler=composer_dist.get_sampler(rows))
    saving = {"save_folder": str(FOLDER), "save_interval": "1ba", "save_num_checkpoints_to_keep": 1}
    for upto, how in (("2ba", saving), ("4ba", {"load_path": str(FOLDER / "latest-rank0.pt")})):
        run = Trainer(model=Module(), train_dataloader=data, max_duration=upto, device="cpu", **how)
        run.fit()
        run.close()
        assert run.state.timestamp.batch == upto


def torchtune() -> None:
    from torchtune.training import FullModelTorchTuneCheckpointer  # noqa: PLC0415
    from torchtune.training.checkpointing._checkpointer import (  # noqa: PLC0415
        DistributedCheckpointer,
    )

    source = FOLDER / "source"
    weights = {"model": model().state_dict()}
    if RANK == 0:
        source.mkdir()
        torch.save(weights["model"], source / "model.pt")
        recipe = {"optimizer": {"a": torch.ones(1000)}, "epochs_run": 1}
        whole = FullModelTorchTuneCheckpointer(
            str(source), ["model.pt"], "LLAMA2", str(FOLDER / "out")
        )
        whole.load_checkpoint()
        whole.save_checkpoint({**weights, **recipe}, epoch=0, intermediate_checkpoint=True)
    distributed.barrier()
    spread = DistributedCheckpointer(str(source), str(FOLDER / "spread"))
    for epoch in range(2):
        spread.save_checkpoint(weights, epoch, save_async=not epoch)
    loaded = spread.load_checkpoint({"model": model().state_dict()})
    assert torch.equal(loaded["model"]["0.weight"], weights["model"]["0.weight"])


def torchtitan() -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torchtitan.components.checkpoint import CheckpointManager  # noqa: PLC0415

    class Counter:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = state["step"]

    one, counter = model(), Counter()
    fully_shard(one, mesh=init_device_mesh("cpu", (2,)))

    def manager(mode: str) -> Any:
        return CheckpointManager(
            CheckpointManager.Config(
                enable=True,
                interval=1,
                async_mode=mode,
                folder=mode,
                keep_latest_k=2,
                last_save_model_only=False,
            ),
            dataloader=None,
            model_parts=[one],
            optimizers=Counter(),
            lr_schedulers=Counter(),
            states={"train_state": counter},
            sd_adapter=None,
            base_folder=str(FOLDER),
        )

    for mode in ("disabled", "async"):
        saves = manager(mode)
        for counter.step in range(1, 5):
            saves.save(counter.step, last_step=counter.step == 4)
        saves.close()
        counter.step = 0
        loads = manager(mode)
        assert loads.load()
        assert counter.step == 4
        loads.close()


class Local:
    """A state on the CPU, with the methods that NVIDIA's resiliency extension calls."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Do nothing, because the tensors are on the CPU."""

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Do nothing, because the tensors are on the CPU."""


def nvrx() -> None:
    """Save local checkpoints. The other kinds need a GPU."""
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (  # noqa: PLC0415
        LocalCheckpointManager,
    )

    for iteration in (1, 2):
        state = {"model": {name: one + iteration for name, one in model().state_dict().items()}}
        LocalCheckpointManager(FOLDER).save(Local(state), iteration)
    saved = LocalCheckpointManager(FOLDER)
    assert saved.find_latest() == 2
    loaded, _ = saved.load()
    assert torch.equal(loaded.state["model"]["0.bias"], state["model"]["0.bias"])


SCENES = {
    one.__name__: one
    for one in (
        *(dcp, opened, lightning, accelerate, trainer, deepspeed, sb3),
        *(composer, torchtune, torchtitan, nvrx, deepspeed_plugin),
    )
}
#: scenes that initialize the process group themselves
_OWN = (
    *(lightning, accelerate, trainer, deepspeed, sb3, opened),
    *(composer, deepspeed_plugin),
)

if __name__ == "__main__":
    scene = SCENES[sys.argv[1]]
    FOLDER.mkdir(exist_ok=True)
    if scene is deepspeed:
        import deepspeed as _framework

        _framework.init_distributed("gloo")
    elif scene not in _OWN:
        distributed.init_process_group("gloo")
    scene()
    if distributed.is_initialized():
        distributed.destroy_process_group()
        # A thread of gloo may still have to free a tensor, for which it needs the GIL. If Python
        # ends meanwhile, torch aborts the process. So this skips Python's finalization.
        atexit._run_exitfuncs()
        os._exit(0)
