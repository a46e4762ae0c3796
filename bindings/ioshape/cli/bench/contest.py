# SPDX-License-Identifier: Apache-2.0
"""What "ioshape bench" measures: the same object, saved in several ways, in turns.

Taking turns makes a disk that is slow for a while slow for all.
"""

from __future__ import annotations

import math
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

import ioshape
from ioshape import _torch as original
from ioshape.cli.bench import ceiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape import Report, SaveHandle

TORCH = "torch_save"
TORCH_FSYNC = "torch_save_fsync"
SAVE = "ioshape_save"
STALL = "ioshape_save_async_stall"
ASYNC = "ioshape_save_async"
CEILING = "ceiling"

_CALIBRATION_BYTES = 256 << 20
_RANDOM_ITEMS = 4 << 20


@dataclass
class Sample:
    """One run."""

    seconds: float
    n_bytes: int
    #: of this process; None if others did the work, or if it was not over yet
    cpu_seconds: float | None = None


@dataclass
class Summary:
    """All runs of one contestant."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return median(sample.seconds for sample in self.samples)

    @property
    def gb_per_s(self) -> float:
        return median(sample.n_bytes / sample.seconds / 1e9 for sample in self.samples)

    @property
    def cpu_seconds_per_gb(self) -> float | None:
        found = [
            sample.cpu_seconds / (sample.n_bytes / 1e9)
            for sample in self.samples
            if sample.cpu_seconds is not None
        ]
        return median(found) if found else None


def make_state(n_bytes: int) -> dict[str, torch.Tensor]:
    """The parameters of a transformer, as many layers as fit, with values that do not compress."""
    items = n_bytes // 4
    hidden = 16
    while 12 * (2 * hidden) ** 2 * 4 <= items and hidden < 4096:
        hidden *= 2
    shapes = {
        "attention.qkv.weight": (3 * hidden, hidden),
        "attention.out.weight": (hidden, hidden),
        "norm.weight": (hidden,),
        "mlp.up.weight": (4 * hidden, hidden),
        "mlp.down.weight": (hidden, 4 * hidden),
    }
    values = torch.empty(min(items, _RANDOM_ITEMS)).uniform_(-1, 1)
    state: dict[str, torch.Tensor] = {}
    layer = 0
    left = items
    while left >= sum(math.prod(shape) for shape in shapes.values()):
        for name, shape in shapes.items():
            state[f"layers.{layer}.{name}"] = _filled(shape, values)
            left -= math.prod(shape)
        layer += 1
    if left:
        state["embedding.weight"] = _filled((left,), values)
    return state


def _filled(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape)
    for part in torch.split(tensor.view(-1), len(values)):
        part.copy_(values[: len(part)])
    return tensor


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Contest:
    """All contestants on one folder, which is the caller's to remove."""

    def __init__(self, folder: Path, n_bytes: int, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self.n_bytes = n_bytes
        self.tell = tell
        self.summaries = {
            name: Summary() for name in (TORCH, TORCH_FSYNC, SAVE, STALL, ASYNC, CEILING)
        }
        self.report: Report | None = None
        self.ceiling: ceiling.Writer | None = None
        self._under_way: SaveHandle | None = None
        tell("making tensors")
        self.state = make_state(n_bytes)

    def run(self, rounds: int) -> None:
        """Fills the summaries."""
        path = self.folder / "ceiling"
        self.ceiling = ceiling.choose(
            path,
            min(self.n_bytes, _CALIBRATION_BYTES),
            lambda name: self.tell(f"looking for the ceiling: {name}"),
        )
        contestants = {
            "torch.save": self._torch,
            "torch.save + fsync": self._torch_fsync,
            "ioshape.save": self._save,
            "ioshape.save_async": self._save_async,
            self.ceiling.name: self._ceiling,
        }
        names = list(contestants)
        # The first run of each makes buffers, and does not count. The ceiling had its own.
        for name in names[:-1]:
            self._one(f"warming up: {name}", contestants[name])
        for turn in range(rounds):
            # Who begins changes.
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                for key, sample in self._one(
                    f"round {turn + 1} of {rounds}: {name}", contestants[name]
                ).items():
                    self.summaries[key].samples.append(sample)

    def stop(self) -> None:
        """Leaves nothing under way that writes into the folder."""
        if self._under_way is not None:
            self._under_way.cancel()

    def _one(self, what: str, contestant: Callable[[Path], dict[str, Sample]]) -> dict[str, Sample]:
        self.tell(what)
        path = self.folder / "model.pt"
        try:
            return contestant(path)
        finally:
            _settle(path)

    def _torch(self, path: Path) -> dict[str, Sample]:
        cpu, begin = _cpu_seconds(), time.perf_counter()
        original.save(self.state, path)
        return {TORCH: self._sample(begin, cpu, path)}

    def _torch_fsync(self, path: Path) -> dict[str, Sample]:
        cpu, begin = _cpu_seconds(), time.perf_counter()
        original.save(self.state, path)
        _sync(path)
        return {TORCH_FSYNC: self._sample(begin, cpu, path)}

    def _save(self, path: Path) -> dict[str, Sample]:
        cpu, begin = _cpu_seconds(), time.perf_counter()
        self.report = ioshape.save(self.state, path, durable=True)
        return {SAVE: self._sample(begin, cpu, path)}

    def _save_async(self, path: Path) -> dict[str, Sample]:
        cpu, begin = _cpu_seconds(), time.perf_counter()
        self._under_way = ioshape.save_async(self.state, path, durable=True)
        stall = time.perf_counter() - begin
        self._under_way.wait()
        whole = self._sample(begin, cpu, path)
        self._under_way = None
        return {STALL: Sample(stall, whole.n_bytes), ASYNC: whole}

    def _ceiling(self, path: Path) -> dict[str, Sample]:
        assert self.ceiling is not None
        written = self.ceiling.write(path, self.n_bytes)
        return {CEILING: Sample(written.seconds, written.n_bytes)}

    @staticmethod
    def _sample(begin: float, cpu: float, path: Path) -> Sample:
        seconds, cpu_seconds = time.perf_counter() - begin, _cpu_seconds() - cpu
        return Sample(seconds, path.stat().st_size, cpu_seconds)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _settle(path: Path) -> None:
    """Leaves the disk with nothing to do for those who were before."""
    if path.exists():
        _sync(path)
        path.unlink()
