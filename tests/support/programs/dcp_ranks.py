# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load checkpoints of torch.distributed.checkpoint.

Run as a program it is all ranks; see ranks.py.
"""

import threading
import warnings
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

BASE = torch.arange(60.0).reshape(10, 6)


def _tensors(size: int, factor: float) -> dict[str, Any]:
    """Return tensors split by rows, by columns and unevenly, a replicated one, and more."""
    mesh = init_device_mesh("cpu", (size,))
    return {
        "rows": distribute_tensor(BASE * factor, mesh, [Shard(0)]),
        "columns": distribute_tensor(BASE * factor, mesh, [Shard(1)]),
        "uneven": distribute_tensor(torch.arange(7) * int(factor), mesh, [Shard(0)]),
        "replicated": distribute_tensor(BASE.to(torch.bfloat16) * factor, mesh, [Replicate()]),
        "plain": {"weights": BASE * factor, "scalar": torch.tensor(2.5 * factor)},
        "step": int(factor) * 7,
        # The size of an object that is no tensor is unknown when the files are planned.
        "note": b"long" * (1 << 18) * 2,
    }


def _model(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.arange(12.0).reshape(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _whole(state: Any) -> Any:
    """Return the state with whole tensors, which are equal on every rank."""
    if isinstance(state, dict):
        return {key: _whole(value) for key, value in state.items()}
    value = state.full_tensor() if hasattr(state, "full_tensor") else state
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _state(size: int) -> dict[str, Any]:
    model, optimizer = _model(size)
    weights, moments = get_state_dict(model, optimizer)
    return {"tensors": _tensors(size, 3), "model": weights, "optimizer": moments}


def _load(size: int, reader: Any) -> Any:
    model, optimizer = _model(size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    state = {"tensors": _tensors(size, 0), "model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return _whole({"tensors": state["tensors"], "model": model.state_dict(), "optimizer": moments})


class _Broken(dcp.DefaultSavePlanner):
    """A planner of a rank that fails while it writes."""

    def resolve_data(self, _write_item: Any) -> Any:
        raise OSError("no such luck")


def _save_stage(folder: Path, rank: int, size: int) -> dict[str, Any]:
    import ioshape.dcp  # noqa: PLC0415 - not where stock loads

    state = _state(size)
    outcomes: dict[str, Any] = {"state": _whole(state)}
    dcp.save(state, checkpoint_id=folder / "stock")
    writer = ioshape.dcp.Writer(folder / "ours")
    dcp.save(state, storage_writer=writer)
    outcomes["paths"] = [report.path for report in writer.reports]
    # Replaces an existing checkpoint, with the cached plans of the save before.
    for factor in (1, 2, 3):
        state["tensors"] = _tensors(size, factor)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=ioshape.dcp.Writer(folder / "replaced"), planner=planner)
    future: Any = dcp.async_save(state, storage_writer=ioshape.dcp.Writer(folder / "async"))
    future.result()
    planner = _Broken() if rank == size - 1 else dcp.DefaultSavePlanner()
    for name in ("replaced", "never"):
        try:
            broken = ioshape.dcp.Writer(folder / name)
            dcp.save(state, storage_writer=broken, planner=planner)
        except dcp.CheckpointException as error:
            outcomes[f"failure of {name}"] = sorted(error.failures)
            broken.reset()  # on rank 0 it does not know yet that another rank has failed
    if hasattr(dcp.state_dict_saver, "AsyncSaveResponse"):
        outcomes["failure of changed"] = _save_changed(folder / "never", changes=rank == size - 1)
    return outcomes


def _save_changed(path: Path, *, changes: bool) -> list[int]:
    """Change one rank's tensor before it is copied. Return the ranks that failed."""
    import ioshape.dcp  # noqa: PLC0415
    from ioshape._integrations.dcp import staging  # noqa: PLC0415

    begin = threading.Event()

    def copy_later(copying: Any) -> None:
        begin.wait(60)
        copying._copy_rest()

    staging._Later._copy_in_background = copy_later  # type: ignore[method-assign, assignment]
    tensor = torch.ones(1 << 19)
    writer = ioshape.dcp.Writer(path, lazy=True)
    response: Any = dcp.async_save({"large": tensor}, storage_writer=writer)
    if changes:
        tensor += 1
    begin.set()
    return sorted(response.upload_completion.exception(60).failures)


def _examine_stage(folder: Path, rank: int, _size: int) -> dict[str, Any]:
    """Save replicated tensors, of which each rank writes some: first with a frozen one."""
    import ioshape.dcp  # noqa: PLC0415

    state = {"frozen": torch.ones(1 << 19), "a": torch.zeros(1 << 19)}
    outcomes: dict[str, Any] = {}

    def save(number: int) -> None:
        writer = ioshape.dcp.Writer(folder / f"step-{number}")
        dcp.save(state, storage_writer=writer)
        outcomes[f"alarms of {number}"] = [one.alarms for one in writer.reports]

    save(1)
    state["a"] += 1
    save(2)
    save(3)  # a copy that was taken once
    state["a"][0] = torch.nan if rank else 1
    state["frozen"][0] = torch.nan if rank else 1
    save(4)
    state["a"][:] = 0
    state["frozen"][:] = 0
    outcomes["path"] = ioshape.dcp.load_latest(state, folder, healthy=True)
    outcomes["loaded"] = float(state["a"].sum())
    state["a"] += 1
    save(5)  # each rank has loaded more than it saves
    return outcomes


def _load_stage(folder: Path, _rank: int, size: int) -> dict[str, Any]:
    # First by stock torch, before ioshape is imported.
    names = ("ours", "replaced", "async")
    outcomes = {
        f"{name}, by stock": _load(size, dcp.FileSystemReader(folder / name)) for name in names
    }
    import ioshape.dcp  # noqa: PLC0415

    for name in ("stock", "ours"):
        outcomes[f"{name}, by us"] = _load(size, ioshape.dcp.Reader(folder / name))
    return outcomes


def run(stage: str, folder: Path, size: int, nodes: int = 0) -> list[Any]:
    """Return the result of each rank.

    With `nodes` they simulate so many nodes, with a file for each.
    """
    variables = [
        {"IOSHAPE_MODE": "node", "IOSHAPE_TEST_NODE": str(rank * nodes // size)} if nodes else {}
        for rank in range(size)
    ]
    return ranks.run(__file__, stage, folder, size, variables)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ranks.serve({"save": _save_stage, "load": _load_stage, "examine": _examine_stage})
