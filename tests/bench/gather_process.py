# SPDX-License-Identifier: Apache-2.0
"""Run one rank of a job in Python. It saves and loads with ioshape and torch, and sends over gloo.

The process speaks the protocol of torch_process.py. As under torchrun, the environment has its
rank.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import ioshape
import ioshape._group.group
import torch
import torch.distributed

from . import torch_state
from .torch_process import Cost, PeakMemory, number_of, serve, told
from .worker import Answer

PAGE = 4096


class Moment(Cost):
    """A cost with the begin and end on the clock that all processes share."""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.answer["ended_s"] = time.monotonic()
        self.answer["began_s"] = float(self.answer["ended_s"]) - float(self.answer["seconds"])


class Rank:
    def __init__(self) -> None:
        self.state: Any = None
        self.size = 0
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def meet(self) -> Answer:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        return {}

    # ---- Making the state -----------------------------------------------------------------------

    def make(self, size: str) -> Answer:
        self.size = int(size)
        self.state = {**torch_state.make(self.size), **self._own()}
        flat = torch_state.flatten(self.state, self.size)
        return {"bytes": float(sum(tensor.nbytes for tensor in flat.values()))}

    def share(self, path: str, size: str) -> Answer:
        """Map one tensor that all ranks share in memory, so that many ranks fit."""
        tensor = torch.from_file(path, shared=True, size=int(size), dtype=torch.uint8)
        tensor[::PAGE].sum()  # reads every page, so that it counts as this process's memory
        self.state = {"weights": tensor, **self._own()}
        return {"bytes": float(tensor.nbytes)}

    def _own(self) -> dict[str, str]:
        """Return what no other rank has. A checkpoint keeps states that are equal only once."""
        return {"rank": os.environ.get("RANK", "")}

    def forget(self) -> Answer:
        self.state = None
        return {}

    # ---- Saving -----------------------------------------------------------------------------

    def save_group(self, path: str, step: str, mode: str) -> Answer:
        with PeakMemory() as memory, Moment() as cost:
            report = ioshape.save_group(self.state, path, int(step), mode=mode)
        return {**cost.answer, **told(report), "extra_mib": memory.extra_mib}

    def save_file(self, path: str) -> Answer:
        ioshape.save(self.state, path)
        return {}

    def save_torch(self, path: str) -> Answer:
        torch.save(self.state, path)
        return {}

    # ---- Sending ----------------------------------------------------------------------------

    def buffers(self, size: str) -> Answer:
        """Make a buffer as large as a rank's state, in one piece."""
        self.buffer = torch.ones(int(size), dtype=torch.uint8)
        return {}

    def gloo(self, how: str) -> Answer:
        """Send the bytes of all ranks to rank 0."""
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        with Moment() as cost:
            if rank:
                torch.distributed.send(self.buffer, 0)
            elif how == "at once":
                # All messages can share one buffer, because their contents do not matter.
                works = [torch.distributed.irecv(self.buffer, other) for other in range(1, ranks)]
                for work in works:
                    assert work is not None  # it is None only in processes outside of the group
                    work.wait()
            else:
                for other in range(1, ranks):
                    torch.distributed.recv(self.buffer, other)
        return cost.answer

    # ---- Loading ----------------------------------------------------------------------------

    def prepare_load(self) -> Answer:
        """Close the group, so that the next load works as in a process that has just started."""
        ioshape._group.group.close()
        ctypes.CDLL(None).malloc_trim(0)
        return {}

    def load(self, how: str, path: str, check: str = "0") -> Answer:
        """Load this rank's share of a checkpoint, or its own file with torch."""
        return self._load(ioshape.load_group if how == "ioshape" else torch.load, path, check)

    def load_file(self, how: str, path: str, check: str = "0") -> Answer:
        """Load a file that other ranks load, too."""
        ctypes.CDLL(None).malloc_trim(0)
        return self._load(ioshape.load if how == "ioshape" else torch.load, path, check)

    def _load(self, load: Callable[[str], Any], path: str, check: str) -> Answer:
        before = number_of("io", "read_bytes")
        with Moment() as cost:
            loaded = load(path)
        if check == "1":
            torch_state.require_plain_equal(loaded)
            torch_state.require_equal(torch_state.flatten(loaded, self.size), self.size)
        return {**cost.answer, "read_bytes": float(number_of("io", "read_bytes") - before)}


if __name__ == "__main__":
    serve(Rank())
