# SPDX-License-Identifier: Apache-2.0
"""Models that are spread over processes: what a rank saves, and what it finds when it loads.

Run as a program it is all ranks; see ranks.py. The stage "load" does not import ioshape.
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
from same import describe
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))


def _train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.arange(12.0).reshape(2, 6)).sum().backward()
    optimizer.step()
    return optimizer


def distributed_tensors(size: int) -> Any:
    """Return split, replicated and unevenly split tensors, and a parameter."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shards",))
    base = torch.arange(60.0).reshape(10, 6)
    return {
        "rows": distribute_tensor(base, mesh, [Shard(0)]),
        "columns": distribute_tensor(base, mesh, [Shard(1)]),
        "replicated": distribute_tensor(base, mesh, [Replicate()]),
        "uneven": distribute_tensor(torch.arange(7), mesh, [Shard(0)]),
        "parameter": nn.Parameter(distribute_tensor(base, mesh, [Shard(0)])),
        "local": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]),
    }


def fsdp2(size: int) -> Any:
    """Return the state dicts of a model under fully_shard()."""
    model = _model()
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    optimizer = _train(model)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def fsdp1(_size: int, kind: StateDictType = StateDictType.SHARDED_STATE_DICT) -> Any:
    """Return the state dicts of a model in FullyShardedDataParallel, sharded by default."""
    model = FullyShardedDataParallel(_model(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = _train(model)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        return {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }


def fsdp1_local(size: int) -> Any:
    """Return the state dicts of such a model as flat parameters."""
    return fsdp1(size, StateDictType.LOCAL_STATE_DICT)


def fsdp1_full(size: int) -> Any:
    """Return the full state dicts of such a model."""
    return fsdp1(size, StateDictType.FULL_STATE_DICT)


def ddp(_size: int) -> Any:
    """Return the state dicts of a model in DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(_model())
    return {"model": model.state_dict(), "optimizer": _train(model).state_dict()}


_ALL = (distributed_tensors, fsdp2, fsdp1, fsdp1_local, fsdp1_full, ddp)
CASES: dict[str, Callable[[int], Any]] = {case.__name__: case for case in _ALL}

KINDS = ("theirs", "ours", "background")
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"weights_only": False},
    "safe": {"weights_only": True},
    "mapped": {"weights_only": False, "mmap": True},
}


def _save(folder: Path, rank: int, size: int) -> dict[str, Any]:
    import ioshape  # noqa: PLC0415 - not in the other stage

    outcomes: dict[str, Any] = {}
    for name, build in CASES.items():
        value = build(size)
        theirs = folder / f"{name}.{rank}.theirs.pt"
        torch.save(value, theirs)
        report = ioshape.save(value, folder / f"{name}.{rank}.ours.pt")
        ioshape.save_async(value, folder / f"{name}.{rank}.background.pt").wait()
        outcomes[name] = {
            "saved": describe(value),
            "written by": report.written_by,
            "theirs, by us": describe(ioshape.load(theirs, weights_only=False)),
        }
    return outcomes


def _load(folder: Path, rank: int, _size: int) -> dict[str, Any]:
    sys.modules["ioshape"] = None  # type: ignore[assignment]
    outcomes: dict[str, Any] = {}
    for name, kind, way in itertools.product(CASES, KINDS, WAYS):
        path = folder / f"{name}.{rank}.{kind}.pt"
        try:
            found = describe(torch.load(path, **WAYS[way]))
        except Exception as error:
            found = (type(error).__name__, str(error))
        outcomes[f"{name}: {kind}, {way}"] = found
    return outcomes


if __name__ == "__main__":
    ranks.serve({"save": _save, "load": _load})
