# SPDX-License-Identifier: Apache-2.0
"""Let the ranks of a DeepSpeed job agree whether a checkpoint has succeeded."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# A rank waits for the slowest rank's files. Storage may take much longer than a training step.
_TIMEOUT = timedelta(hours=24)


class Ranks:
    """A gloo group for these messages only. All ranks create it at one point in their program.

    The group of the training may use NCCL, which stops the job when a checkpoint is slow. The
    collectives of a group must also come in one order on all ranks, which a background thread
    cannot guarantee.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        group = None
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        self._group = group

    def all_agree(self, mine: bool) -> bool:
        """Return whether all ranks say yes. Each rank waits for the others."""
        if self._group is None:
            return mine
        said = torch.tensor([mine], dtype=torch.uint8)
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        # Call the group's own method. Functions of torch.distributed use a registry that
        # destroy_process_group() empties, while a save may still be in progress.
        self._group.allreduce([said], options).wait()
        return bool(said.item())
