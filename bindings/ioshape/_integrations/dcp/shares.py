# SPDX-License-Identifier: Apache-2.0
"""Compute which files several ranks write together, and the range of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.checkpoint.planner import SavePlanner

from ioshape._core.config import value_of
from ioshape._core.job import node_name
from ioshape._save.atomic import PART_UNIT, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.checkpoint.planner import SavePlan

# Bytes of an item in a file besides its data, at most: an archive has a directory, and a checksum
# for each MiB. The size of an item that is not a tensor is unknown before it is written.
_ITEM_BYTES = 8 << 10
# Bytes of a tensor's pickle beside its data: a few hundred, unless the tensor has attributes.
_PICKLE_BYTES = 1 << 10


class Node(NamedTuple):
    """A key that a rank sends to rank 0 with its plan. Ranks with equal keys write one file."""

    name: str


class Share(NamedTuple):
    """A rank's range of a file that several ranks write."""

    #: name of the file
    file: str
    part: Part


def own_node() -> Node | None:
    """Return this rank's key by the setting `mode`; None if it writes its own file, as with DCP."""
    mode = value_of("mode")
    if mode == "node":
        return Node(node_name())
    return Node("") if mode == "rank0" else None


def most_bytes(n_bytes: int) -> int:
    """Return the largest size in a file of an item with this many bytes of data."""
    return n_bytes + (n_bytes >> 16) + _ITEM_BYTES


def planned_bytes(plan: SavePlan) -> int:
    """Return the bytes that a rank asks for, which suffice for its tensors and their pickles."""
    return sum(most_bytes(n_bytes + _PICKLE_BYTES) for n_bytes in tensor_bytes(plan))


def tensor_bytes(plan: SavePlan) -> list[int]:
    """Return the bytes of each item of a plan; 0 for items that are not tensors."""
    tensors = [item.tensor_data for item in plan.items]
    return [
        one.chunk.sizes.numel() * one.properties.dtype.itemsize if one is not None else 0
        for one in tensors
    ]


def _known_plans(n_ranks: int) -> list[SavePlan]:
    """Return the plans of all ranks that DCP's planner has cached, or none.

    If several kinds of planners have cached plans, it is not known which ones fit.
    """
    kept = list(getattr(SavePlanner, "_cached_global_plan", {}).values())
    return kept[0] if len(kept) == 1 and len(kept[0]) == n_ranks else []


def shares_of(plans: Iterable[SavePlan]) -> list[Share | None]:
    """Return each rank's share of a file; None for ranks that write a file of their own."""
    given = list(plans)
    # If a plan has not changed, DCP does not send it again.
    known = _known_plans(len(given)) or given
    told = [
        plan if getattr(plan, "usable", True) else old
        for plan, old in zip(given, known, strict=True)
    ]
    nodes = [one.storage_data if isinstance(one.storage_data, Node) else None for one in told]
    return shares(list(zip(nodes, map(planned_bytes, told), strict=True)))


def shares(asked: list[tuple[Node | None, int]]) -> list[Share | None]:
    """Return each rank's share, from its node and the bytes that it asks for."""
    nodes: dict[Node, list[int]] = {}
    for rank, (node, n_bytes) in enumerate(asked):
        if node is not None and n_bytes:
            nodes.setdefault(node, []).append(rank)
    found: list[Share | None] = [None] * len(asked)
    for ranks in nodes.values():
        lengths = [-(-asked[rank][1] // PART_UNIT) * PART_UNIT for rank in ranks]
        offset = 0
        for rank, length in zip(ranks, lengths, strict=True):
            part = Part(offset, length, sum(lengths))
            found[rank] = Share(f"__{ranks[0]}_0.distcp", part)
            offset += length
    return found
