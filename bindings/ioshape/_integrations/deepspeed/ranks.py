# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a DeepSpeed job tell each other about a checkpoint: whether it got through."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# A rank waits for the slowest one's files: as long as storage may take, not as long as a step does.
_PATIENCE = timedelta(hours=24)


class Ranks:
    """A gloo group for this alone. All ranks make one at the same place in their program.

    The training's own group may be NCCL's, which stops the job when a checkpoint is slow, and whose
    collectives must come in the same order on all ranks: a thread in the background cannot promise
    that.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        group = None
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            group = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._group = group

    def all_agree(self, mine: bool) -> bool:
        """Whether all ranks say yes. Each of them waits here for the others."""
        if self._group is None:
            return mine
        said = torch.tensor([mine], dtype=torch.uint8)
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        # The group's own method: those of torch.distributed look at a registry that
        # destroy_process_group() empties, while a save may still be under way.
        self._group.allreduce([said], options).wait()
        return bool(said.item())
