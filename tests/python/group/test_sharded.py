# SPDX-License-Identifier: Apache-2.0
"""Shards of distributed models (DTensor, FSDP, FSDP2, DDP) that two ranks save and load."""

import itertools
from typing import Any

import pytest
import ranks
import sharded
import torch.distributed as dist
from same import assert_same_description

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

RANKS = 2


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    """Return for each rank what it saved, and what processes without ioshape loaded."""
    folder = tmp_path_factory.mktemp("ranks")
    return list(
        zip(
            *(ranks.run(sharded.__file__, stage, folder, RANKS) for stage in ("save", "load")),
            strict=True,
        )
    )


@pytest.mark.parametrize("name", sharded.CASES)
@pytest.mark.slow
def test_each_rank_finds_what_it_has_saved(name: str, told: Any) -> None:
    for saved, loaded in told:
        assert saved[name]["written by"] == "ioshape"
        assert_same_description(saved[name]["theirs, by us"], loaded[f"{name}: theirs, whole"])
        for kind, way in itertools.product(sharded.KINDS, sharded.WAYS):
            expected = loaded[f"{name}: theirs, {way}"]
            assert_same_description(loaded[f"{name}: {kind}, {way}"], expected)
        # Torch separates the tensors of this case, which share a storage without bytes.
        if name != "fsdp1_local":
            assert_same_description(loaded[f"{name}: ours, whole"], saved[name]["saved"])


def test_ranks_have_saved_different_parts(told: Any) -> None:
    first, second = (saved for saved, _ in told)
    assert first["distributed_tensors"]["saved"] != second["distributed_tensors"]["saved"]
    assert first["fsdp2"]["saved"] != second["fsdp2"]["saved"]
