# SPDX-License-Identifier: Apache-2.0
"""Run one rank of DLIO's workload megatron_deepspeed, which saves and loads by DLIO's classes.

The process speaks the protocol of torch_process.py. DLIO must be importable. A base class of DLIO
makes the state, and a derived class saves it. The setting `checkpoint_mechanism_classname` of a
workload names the derived class.
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

#: Sizes of configs/workload/megatron_deepspeed.yaml of DLIO 2.0.0, in bytes, for each of 32 ranks.
MODEL = 30102
OPTIMIZER = (1009254400, 865075200, 793600)
LAYERS = 44
LAYER = (129761280, 20971520)

#: Total bytes. For an optimizer DLIO makes two tensors for each group and one of all groups.
WHOLE = MODEL + 3 * sum(OPTIMIZER) + LAYERS * sum(LAYER)


class Torch(PyTorchCheckpointing):  # type: ignore[misc]
    """Saving by torch.save as DLIO calls it, with an fsync so that it is as durable as ioshape."""

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
        """Make the workload, scaled to a size in bytes."""
        share = min(int(size) / WHOLE, 1)
        self.folder = Path(folder)
        # With a single rank, MPI is not initialized.
        DLIOMPI.get_instance().set_parent_values(0, 1)
        arguments = ConfigArguments.get_instance()
        # DLIO would import the named framework with its data readers.
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
        """Read the files back as a restart would. DLIO 2.0.0 itself only saves."""
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
