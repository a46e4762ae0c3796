# SPDX-License-Identifier: Apache-2.0
"""Save and load strategies for Megatron-core's sharded checkpoints.

Example:

    from ioshape.megatron import LoadStrategy, SaveStrategy

    dist_checkpointing.save(state, directory, sharded_strategy=SaveStrategy())
    dist_checkpointing.load(state, directory, sharded_strategy=LoadStrategy())

The format stays "torch_dist", that of torch.distributed.checkpoint. Megatron's own strategy loads
checkpoints of SaveStrategy, and LoadStrategy loads checkpoints of Megatron's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from ioshape._core.replacing import with_ours
from ioshape.dcp import Reader, Writer

try:
    from megatron.core.dist_checkpointing.strategies import torch as _torch_dist
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
except ImportError as _error:
    raise ImportError(
        f"ioshape.megatron needs megatron-core 0.16 or a later one ({_error}); install it: "
        "pip install megatron-core"
    ) from None

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LoadStrategy", "SaveStrategy"]


class SaveStrategy(_torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc] # see pyproject
    """Save strategy, for the argument `sharded_strategy` of dist_checkpointing.save().

    It takes the arguments of Megatron's own strategy; all have a default here.
    """

    def __init__(self, backend: str = "torch_dist", version: int = 1, **kwargs: Any) -> None:
        super().__init__(backend, version, **kwargs)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save the sharded part of a checkpoint durably and atomically.

        Args:
            sharded_state_dict: the state dict that Megatron passes.
            checkpoint_dir: the directory of the checkpoint.
        """
        state, _, _ = _torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = _torch_dist.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        pieces = _torch_dist.mcore_to_pyt_state_dict(state, False)
        dcp.save(pieces, storage_writer=Writer(checkpoint_dir), planner=planner)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Save while the caller waits: DCP's staging cannot copy Megatron's tensors.

        Args:
            sharded_state_dict: the state dict that Megatron passes.
            checkpoint_dir: the directory of the checkpoint.
        """
        self.save(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(None, (), [])


def _reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> Reader:  # noqa: ARG001
    return Reader(checkpoint_dir)


class LoadStrategy(_torch_dist.TorchDistLoadShardedStrategy):  # type: ignore[misc] # see pyproject
    """Load strategy, for the argument `sharded_strategy` of dist_checkpointing.load().

    It verifies every byte that it reads.
    """

    load: Any = with_ours(
        _torch_dist.TorchDistLoadShardedStrategy.load, _torch_dist, _get_filesystem_reader=_reader
    )
