# SPDX-License-Identifier: Apache-2.0
"""Run one rank of a job that saves and loads with torch.distributed.checkpoint.

The process speaks the protocol of torch_process.py. As under torchrun, the environment has its
rank.
"""

from __future__ import annotations

import warnings
from typing import Any

import ioshape.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from .gather_process import Moment
from .torch_process import serve
from .worker import Answer

TENSORS = 16


class Rank:
    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    def meet(self) -> Answer:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo")
        return {}

    def make(self, size: str) -> Answer:
        """Make tensors that no other rank has, so that each rank writes its own."""
        rank, count = dist.get_rank(), int(size) // TENSORS // 4
        self.state = {
            f"{rank}.{number}": torch.randn(count, generator=torch.Generator().manual_seed(number))
            for number in range(TENSORS)
        }
        return {"bytes": float(4 * count * TENSORS)}

    def _writer(self, how: str, path: str) -> Any:
        kind = ioshape.dcp.Writer if how == "ioshape" else dcp.FileSystemWriter
        return kind(path, sync_files=True)

    def save(self, how: str, path: str) -> Answer:
        with Moment() as cost:
            dcp.save(self.state, storage_writer=self._writer(how, path))
        return cost.answer

    def save_async(self, how: str, path: str) -> Answer:
        """Measure how long dcp.async_save() blocks. Finishing the save is not counted."""
        with Moment() as cost:
            future: Any = dcp.async_save(self.state, storage_writer=self._writer(how, path))
        future.result()
        return cost.answer

    def load(self, how: str, path: str) -> Answer:
        reader = ioshape.dcp.Reader(path) if how == "ioshape" else dcp.FileSystemReader(path)
        wanted = {name: tensor.clone() for name, tensor in self.state.items()}
        for tensor in self.state.values():
            tensor.zero_()
        with Moment() as cost:
            dcp.load(self.state, storage_reader=reader)
        if not all(torch.equal(tensor, self.state[name]) for name, tensor in wanted.items()):
            raise RuntimeError("what was loaded is not what was saved")
        return cost.answer


if __name__ == "__main__":
    serve(Rank())
