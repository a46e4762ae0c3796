# SPDX-License-Identifier: Apache-2.0
"""One rank of DLIO's workload megatron_deepspeed, which saves and loads by DLIO's own classes.

It speaks as torch_process.py does. DLIO must be importable. It asks a base class for what a
checkpoint is made of, and a derived one for how a state is saved: `checkpoint_mechanism_classname`
of a workload names such a class.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import torch
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.common.enumerations import CheckpointLocationType
from dlio_benchmark.utils.config import ConfigArguments
from dlio_benchmark.utils.utility import DLIOMPI

from .gather_process import Moment
from .torch_process import serve
from .worker import Answer

#: configs/workload/megatron_deepspeed.yaml of DLIO 2.0.0, in bytes, for each of 32 ranks
MODEL = 30102
OPTIMIZER = (1009254400, 865075200, 793600)
LAYERS = 44
LAYER = (129761280, 20971520)

#: Of an optimizer's groups DLIO makes two tensors each, and one of all together.
WHOLE = MODEL + 3 * sum(OPTIMIZER) + LAYERS * sum(LAYER)


class Torch(PyTorchCheckpointing):  # type: ignore[misc]
    """torch.save as DLIO calls it, and durable, as ours is."""

    def save_state(self, suffix: str, state: Any) -> None:
        with Path(self.get_name(suffix)).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


class Ioshape(PyTorchCheckpointing):  # type: ignore[misc]
    def save_state(self, suffix: str, state: Any) -> None:
        ioshape.save(state, self.get_name(suffix))


WAYS = {"torch": (Torch, torch.load), "ioshape": (Ioshape, ioshape.load)}


class Rank:
    def __init__(self) -> None:
        self.mechanisms: dict[str, Any] = {}
        self.folder = Path()

    def make(self, size: str, folder: str) -> Answer:
        """The workload, scaled to a size."""
        share = min(int(size) / WHOLE, 1)
        self.folder = Path(folder)
        # One rank of one: no MPI is begun.
        DLIOMPI.get_instance().set_parent_values(0, 1)
        arguments = ConfigArguments.get_instance()
        # The one that is named would be imported, with its readers of data.
        arguments.framework = None
        arguments.my_rank = 0
        arguments.checkpoint_folder = folder
        arguments.checkpoint_type = CheckpointLocationType.ALL_RANKS
        arguments.model_size = MODEL
        arguments.optimization_groups = [int(share * group) for group in OPTIMIZER]
        arguments.num_layers = LAYERS
        arguments.layer_parameters = [int(share * part) for part in LAYER]
        self.mechanisms = {way: kind() for way, (kind, _) in WAYS.items()}
        return {"share": share}

    def save(self, way: str) -> Answer:
        with Moment() as cost:
            self.mechanisms[way].checkpoint(1, 1)
        return {**cost.answer, "bytes": float(sum(file.stat().st_size for file in self._files()))}

    def load(self, way: str) -> Answer:
        """What a restart reads: DLIO 2.0.0 saves only."""
        read = WAYS[way][1]
        with Moment() as cost:
            for file in self._files():
                read(file)
        return cost.answer

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.pt"))


VERBS: dict[str, Callable[..., Answer]] = {"make": Rank.make, "save": Rank.save, "load": Rank.load}


if __name__ == "__main__":
    serve(Rank(), VERBS)
