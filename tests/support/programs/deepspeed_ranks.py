# SPDX-License-Identifier: Apache-2.0
"""Two ranks that train with DeepSpeed, and save and load its checkpoints.

Run as a program: deepspeed_ranks.py WHAT STAGE OPTIONS. OPTIONS are JSON, for DeepSpeed's
configuration. The ranks work in the current folder. One process forks them, because the imports
take longer than their work.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._inductor.compile_fx  # an engine imports it
from torch import distributed

WHAT, STAGE, OPTIONS = sys.argv[1:4]
#: number of this process, as the launcher would set it
RANK = ""

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": int(STAGE)},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "bf16": {"enabled": int(STAGE) > 0},
    **json.loads(OPTIONS),
}


def make(**more: Any) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 8))
    config = {**CONFIG, **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, first: int) -> float:
    """Train three steps. Return the loss of the last one."""
    for step in range(first, first + 3):
        torch.manual_seed(step)
        inputs = torch.randn(2, 64, dtype=torch.bfloat16 if int(STAGE) else torch.float32)
        loss = engine(inputs).float().square().mean()
        engine.backward(loss)
        engine.step()
    return float(loss.item())


def save(engine: Any) -> float:
    """Save after three steps and train three more. Return the loss of the last one."""
    train(engine, 0)
    engine.save_checkpoint("run", client_state={"step": 3})
    whole = train(engine, 3)
    engine.destroy()
    distributed.barrier()
    return whole


def assert_goes_on(loss: float, **more: Any) -> None:
    engine = make(**more)
    _, state = engine.load_checkpoint("run")
    assert state["step"] == 3
    again = train(engine, 3)
    assert again == loss, (again, loss)
    engine.destroy()


def unchanged() -> None:
    """Run a script that does not mention ioshape."""
    assert_goes_on(save(make()))


def json_config() -> None:
    import ioshape.deepspeed  # noqa: PLC0415

    engine = make()
    assert isinstance(engine.checkpoint_engine, ioshape.deepspeed.CheckpointEngine)
    assert engine.checkpoint_engine.background == CONFIG["ioshape"].get("background", False)
    assert_goes_on(save(engine))


def one_line() -> None:
    import ioshape.deepspeed  # noqa: PLC0415

    engine = make()
    assert "ioshape" not in type(engine.checkpoint_engine).__module__
    engine.checkpoint_engine = ioshape.deepspeed.CheckpointEngine(background=True)
    assert_goes_on(save(engine))
    if RANK == "0":
        engine = torch.load("run/global_step3/mp_rank_00_model_states.pt", weights_only=False)
        assert engine["step"] == 3


def universal() -> None:
    """Convert a checkpoint by DeepSpeed's tool, and resume training from the result."""
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415

    loss = save(make())
    if RANK == "0":
        arguments = [
            *("--input_folder", "run/global_step3", "--output_folder", "run/universal"),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
            "--inject_missing_state",
        ]
        sys.argv = ["ds_to_universal", *arguments]
        ds_to_universal.main(ds_to_universal.parse_arguments())
        assert Path("run/latest_universal").read_text(encoding="utf-8") == "universal"
    distributed.barrier()
    assert_goes_on(loss, checkpoint={"load_universal": True})


def one_rank_fails() -> None:
    """Check that both ranks raise if rank 1 cannot write.

    The earlier checkpoint stays the latest.
    """
    import ioshape.deepspeed  # noqa: PLC0415

    engine = make()
    engine.save_checkpoint("run", tag="sound")
    engine.checkpoint_engine.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    said = ""
    try:
        engine.save_checkpoint("run", tag="lost")
        engine.checkpoint_engine.wait()
    except ioshape.StorageError as error:
        said = str(error)
    assert said
    assert ("another rank failed" in said) == (RANK == "0"), said
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path("run/latest").read_text(encoding="utf-8") == "sound"
    distributed.barrier()
    engine.save_checkpoint("run", tag="next")
    engine.checkpoint_engine.wait()
    assert Path("run/latest").read_text(encoding="utf-8") == "next"
    engine.destroy()


def held() -> None:
    """Check that training continues while files wait for a slot, and that "latest" is not changed
    yet.
    """
    import ioshape.deepspeed  # noqa: PLC0415
    from ioshape._integrations.huggingface import whole  # noqa: PLC0415

    ioshape.configure(slots=1)
    engine = make()
    train(engine, 0)
    with ioshape.slot("run") if RANK == "0" else contextlib.nullcontext():
        distributed.barrier()
        engine.save_checkpoint("run", tag="first")
        train(engine, 3)
        assert not Path("run/latest").exists()
        distributed.barrier()
    engine.checkpoint_engine.wait()
    if RANK == "0":
        assert Path("run/latest").read_text(encoding="utf-8") == "first"
    # transformers and accelerate save into a directory that is renamed when it is complete.
    path = str(Path("whole").resolve())
    if RANK == "0":
        threading.Timer(2, ioshape.slot("run").release).start()
    distributed.barrier()
    with whole.checkpoint(path):
        engine.save_checkpoint(whole.redirected(path), tag="inside")
    assert Path("whole/latest").read_text(encoding="utf-8") == "inside"
    engine.save_checkpoint("run", tag="second")
    engine.save_16bit_model("model")
    assert Path("run/latest").read_text(encoding="utf-8") == "second"
    assert Path("model/pytorch_model.bin").stat().st_size
    engine.destroy()


def be_rank(rank: str) -> None:
    global RANK  # noqa: PLW0603 - a process has one
    RANK = rank
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        LOCAL_SIZE="2",
    )
    meet = Path("meet").resolve().as_uri()
    deepspeed.init_distributed("gloo", False, init_method=meet, rank=int(rank), world_size=2)
    globals()[WHAT]()
    distributed.destroy_process_group()


def main() -> None:
    started = []
    for rank in ("0", "1"):
        started.append(os.fork())
        if not started[-1]:
            be_rank(rank)
            return
    ended = [os.waitpid(pid, 0)[1] for pid in started]
    if any(ended):
        sys.exit(f"ranks ended with {ended}")


if __name__ == "__main__":
    main()
