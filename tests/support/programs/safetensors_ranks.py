# SPDX-License-Identifier: Apache-2.0
"""Ranks that save one set of safetensors files together.

Run as a program it is all ranks; see ranks.py.
"""

import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import ranks
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

MAX_SHARD_BYTES = 5 << 20
#: of each rank, in the stage "large"
LARGE_BYTES = 192 << 20


def _model(size: int) -> dict[str, Any]:
    """Return the state of a model with FSDP2 above tensor parallelism: rows are split twice."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 701), nn.ReLU(), nn.Linear(701, 64))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["data"])
    return model.state_dict()


def state(size: int, factor: int = 1) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return tensors on meshes of one and two dimensions, and the whole tensors.

    No size is a multiple of 1 MiB.
    """
    line = init_device_mesh("cpu", (size,))
    grid = init_device_mesh("cpu", (2, size // 2))
    torch.manual_seed(factor)
    rows = torch.randn(1003, 771)
    cube = torch.randn(7, 130, 301).to(torch.bfloat16)
    how: dict[str, tuple[torch.Tensor, Any, list[Any]]] = {
        "rows": (rows, line, [Shard(0)]),
        "columns": (rows * 2, line, [Shard(1)]),
        "few rows": (torch.randn(3, 90_001), line, [Shard(0)]),
        "uneven": (torch.arange(7) * factor, line, [Shard(0)]),
        "replicated": (torch.randn(1 << 19), line, [Replicate()]),
        "middle": (cube, line, [Shard(1)]),
        "last": (cube * 2, line, [Shard(2)]),
        "both": (cube.to(torch.float64), grid, [Shard(0), Shard(2)]),
        "ends": (cube.to(torch.complex64), grid, [Shard(1), Shard(2)]),
        "twice": (rows > 0, grid, [Shard(0), Shard(0)]),
        "copies": (rows.to(torch.float8_e5m2), grid, [Replicate(), Shard(0)]),
        "empty": (torch.empty(0, 3), line, [Shard(0)]),
        "scalar": (torch.tensor(2.5 * factor), line, [Replicate()]),
    }
    plain = {"plain": torch.randn(5000), "turned": rows.t(), 'a "name" ü\n': torch.ones(3).int()}
    spread = {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        for name, (tensor, mesh, placements) in how.items()
    }
    model = {f"model.{name}": one for name, one in _model(size).items()}
    whole = {
        **{name: tensor for name, (tensor, _, _) in how.items()},
        **{name: tensor.contiguous() for name, tensor in plain.items()},
        **{name: one.full_tensor().clone() for name, one in model.items()},
    }
    return {**spread, **plain, **model}, whole


def _save(folder: Path, rank: int, size: int) -> Any:
    """Save the tensors by ioshape, and the whole tensors by huggingface_hub."""
    import huggingface_hub  # noqa: PLC0415
    from ioshape._integrations.safetensors import sharded  # noqa: PLC0415
    from ioshape.safetensors import save_sharded  # noqa: PLC0415

    (folder / "ours").mkdir(exist_ok=True)
    for factor in (1, 2):  # the second save replaces the first
        sharded.WINDOW_BYTES = factor << 20
        tensors, whole = state(size, factor)
        shard_bytes = MAX_SHARD_BYTES * factor
        reports = save_sharded(tensors, folder / "ours", max_shard_bytes=shard_bytes)
    save_sharded(tensors, folder / "one")
    save_sharded(tensors, folder / "summed", max_shard_bytes=shard_bytes, checksums=True)
    if rank == 0:
        for name, most_bytes in (("theirs", shard_bytes), ("their one", 1 << 30)):
            (folder / name).mkdir()
            huggingface_hub.save_torch_state_dict(whole, folder / name, max_shard_size=most_bytes)
    return [report.path for report in reports]


def _fail(folder: Path, rank: int, size: int) -> Any:
    """Let the last rank fail in each way, and kill it while it writes."""
    import ioshape.safetensors  # noqa: PLC0415
    from ioshape._integrations.dcp.files import Files  # noqa: PLC0415
    from ioshape._integrations.safetensors import sharded  # noqa: PLC0415

    sharded.WINDOW_BYTES = 1 << 20
    path, is_last = folder / "there", rank == size - 1
    ioshape.safetensors.save_sharded(state(size)[0], path)
    tensors, _ = state(size, 2)
    said = []

    def attempt(given: Any) -> None:
        try:
            ioshape.safetensors.save_sharded(given, path)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    attempt({**tensors, "text": "none"} if is_last else tensors)
    attempt({**tensors, "plain": torch.ones(rank + 1)})
    create, created = Files.create, 0

    def no_luck(self: Files, *how: Any) -> Any:
        nonlocal created
        created += 1
        if is_last and created == 2:
            raise OSError("no such luck")
        return create(self, *how)

    Files.create = no_luck  # type: ignore[assignment, method-assign]
    attempt(tensors)

    def killed(self: Files, *how: Any) -> Any:
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return create(self, *how)

    (folder / f"fail.{rank}.outcomes").write_bytes(pickle.dumps(said))
    Files.create = killed  # type: ignore[assignment, method-assign]
    attempt(tensors)
    os._exit(0 if len(said) == 4 else 1)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _large(folder: Path, rank: int, size: int) -> Any:
    """Return how much memory a save takes in addition to the tensors."""
    from ioshape.safetensors import save_sharded  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (size,))
    save_sharded({"small": torch.ones(1 << 20)}, folder / "small")
    width = 1 << 12
    tensors = {}
    for name, dim in (("rows", 0), ("columns", 1)):
        shape = [width, LARGE_BYTES // 2 // width]
        local = torch.full(shape, rank + 1, dtype=torch.uint8)
        tensors[name] = DTensor.from_local(local, mesh, [Shard(dim)])
    before = _peak_bytes()
    save_sharded(tensors, folder / "large")
    return _peak_bytes() - before


if __name__ == "__main__":
    ranks.serve({"save": _save, "fail": _fail, "large": _large})
