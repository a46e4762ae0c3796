# SPDX-License-Identifier: Apache-2.0
"""Two ranks that save and load with megatron-core: megatron_ranks.py RANK, in this folder."""

import os
import sys
from pathlib import Path
from typing import Any

RANK = int(sys.argv[1])
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from ioshape.megatron import LoadStrategy, SaveStrategy  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from torch import distributed  # noqa: E402


def state(factor: float) -> dict[str, Any]:
    """Return a weight of 8 rows, half of it on each rank, and values that both ranks share."""
    rows = torch.arange(4096.0).reshape(4, 1024) * factor + RANK
    weight = ShardedTensor.from_rank_offsets("weight", rows, (0, RANK, 2))
    bias = ShardedTensor.from_rank_offsets("bias", torch.ones(9) * factor, replica_id=RANK)
    return {"weight": weight, "bias": bias, "iteration": 7}


def assert_loads(folder: Path) -> None:
    """Check loads by Megatron's strategy and by ours."""
    expected = state(3)
    for strategy in (None, LoadStrategy()):
        loaded = dist_checkpointing.load(state(0), str(folder), strategy)
        for name in ("weight", "bias"):
            assert torch.equal(loaded[name], expected[name].data), name
        assert loaded["iteration"] == 7


def assert_damage_is_found(folder: Path) -> None:
    """Check that our strategy detects damage in a checkpoint of ours."""
    distributed.barrier()
    for file in folder.glob(f"__{RANK}_*.distcp"):
        content = bytearray(file.read_bytes())
        content[content.index(torch.tensor(3.0 * 2048 + RANK).numpy().tobytes())] ^= 1
        file.write_bytes(content)
    distributed.barrier()
    with pytest.raises(dcp.CheckpointException, match="DamagedError"):
        dist_checkpointing.load(state(0), str(folder), LoadStrategy())


def main() -> None:
    distributed.init_process_group(
        "gloo", init_method=Path("meet").resolve().as_uri(), rank=RANK, world_size=2
    )
    for name in ("now", "later"):
        folder = Path(name)
        folder.mkdir(exist_ok=True)
        distributed.barrier()
        later = name == "later"
        request = dist_checkpointing.save(
            state(3), str(folder), SaveStrategy(), async_sharded_save=later
        )
        if later:
            request.execute_sync()
        distributed.barrier()
        assert_loads(folder)
    assert_damage_is_found(Path("now"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
