# SPDX-License-Identifier: Apache-2.0
"""State dicts for tests of ioshape.dcp, and functions that save and load them."""

import os
from pathlib import Path
from typing import Any

import ioshape.dcp
import torch
import torch.distributed.checkpoint as dcp


def state(factor: float = 1.0) -> dict[str, Any]:
    base = torch.arange(60.0).reshape(10, 6) * factor
    return {
        "model": {"weight": base, "bias": torch.ones(7, dtype=torch.bfloat16) * factor},
        "view": base[2:5],
        "columns": base[:, 2:4],
        "turned": base.t(),
        "scalar": torch.tensor(2.5 * factor),
        "empty": torch.empty(0, 3),
        "complex": torch.ones(3, dtype=torch.complex64) * factor,
        "flags": torch.tensor([True, False]),
        "large": torch.full((3 << 18,), int(factor)),
        "lists": [1, {"deep": torch.ones(2) * factor}],
        "step": factor * 100,
    }


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    return [blank(one) for one in value] if isinstance(value, list) else 0


def assert_same(value: Any, other: Any) -> None:
    """Check that two values are equal bit by bit, whatever else their storages contain."""
    assert type(value) is type(other)
    if isinstance(value, torch.Tensor):
        assert value.dtype == other.dtype
        assert torch.equal(value, other)
    elif isinstance(value, dict):
        assert value.keys() == other.keys()
        for key in value:
            assert_same(value[key], other[key])
    elif isinstance(value, (list, tuple)):
        for one, same in zip(value, other, strict=True):
            assert_same(one, same)
    else:
        assert value == other


def save(path: Path, value: Any, **how: Any) -> ioshape.dcp.Writer:
    writer = ioshape.dcp.Writer(path, **how)
    dcp.save(value, storage_writer=writer, no_dist=True)
    return writer


def by_stock(path: Path, like: Any) -> Any:
    loaded = blank(like)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return loaded


def by_us(path: Path, like: Any) -> Any:
    loaded = blank(like)
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(path), no_dist=True)
    return loaded


def entries(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


class Stopped(dcp.DefaultSavePlanner):
    """A planner that fails at one tensor, after it has listed the folder."""

    def __init__(self, folder: Path, name: str = "large") -> None:
        super().__init__()
        self.folder, self.name = folder, name
        self.seen: list[str] = []

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == self.name:
            self.seen = [one for one in entries(self.folder) if not one.startswith(".")]
            raise OSError("no such luck")
        return super().resolve_data(write_item)


class Runs:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Mine:
    """An object that a user's planner puts into the metadata."""


def damage(file: Path) -> None:
    """Flip a bit in the middle of a tensor of ones."""
    data = bytearray(file.read_bytes())
    data[data.index(b"\0\0\x80\x3f" * 1000) + 40_001] ^= 4
    file.write_bytes(data)
