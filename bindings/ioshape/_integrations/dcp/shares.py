# SPDX-License-Identifier: Apache-2.0
"""Files that several ranks write: which they are, and where each rank's part of one lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.checkpoint.planner import SavePlanner

from ioshape._core.config import value_of
from ioshape._core.job import node_name
from ioshape._save.atomic import PART_UNIT, Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.checkpoint.planner import SavePlan

# What an item takes in a file besides its bytes, at most: as an archive it has a directory, and a
# checksum for each MiB. How long an item is that is no tensor, nobody knows before it is written.
_ITEM_BYTES = 8 << 10
# What the pickle of a tensor takes beside its bytes: a few hundred, unless it has attributes.
_PICKLE_BYTES = 1 << 10


class Node(NamedTuple):
    """What a rank tells rank 0 with its plan: ranks that say the same write one file."""

    name: str


class Share(NamedTuple):
    """A rank's part of a file that others write, too."""

    #: its name
    file: str
    part: Part


def own_node() -> Node | None:
    """By the setting `mode`. None: each rank writes a file of its own, as with DCP."""
    mode = value_of("mode")
    if mode == "node":
        return Node(node_name())
    return Node("") if mode == "rank0" else None


def most_bytes(n_bytes: int) -> int:
    """That so much of one item can take in a file."""
    return n_bytes + (n_bytes >> 16) + _ITEM_BYTES


def planned_bytes(plan: SavePlan) -> int:
    """So much a rank asks for: what most_bytes() says of each item, with its pickle, has room."""
    return sum(most_bytes(n_bytes + _PICKLE_BYTES) for n_bytes in tensor_bytes(plan))


def tensor_bytes(plan: SavePlan) -> list[int]:
    """Of each item of a plan; 0 of those that are no tensors."""
    tensors = [item.tensor_data for item in plan.items]
    return [
        one.chunk.sizes.numel() * one.properties.dtype.itemsize if one is not None else 0
        for one in tensors
    ]


def _known_plans(n_ranks: int) -> list[SavePlan]:
    """Of all ranks, as DCP's planner has kept them. None if it has those of several kinds of
    planners, whose are not told apart here."""
    kept = list(getattr(SavePlanner, "_cached_global_plan", {}).values())
    return kept[0] if len(kept) == 1 and len(kept[0]) == n_ranks else []


def shares_of(plans: Iterable[SavePlan]) -> list[Share | None]:
    """For each rank its share, if it has one."""
    given = list(plans)
    # Of one that is as before, DCP sends none.
    known = _known_plans(len(given)) or given
    told = [
        plan if getattr(plan, "usable", True) else old
        for plan, old in zip(given, known, strict=True)
    ]
    nodes = [one.storage_data if isinstance(one.storage_data, Node) else None for one in told]
    return shares(list(zip(nodes, map(planned_bytes, told), strict=True)))


def shares(asked: list[tuple[Node | None, int]]) -> list[Share | None]:
    """The same, from each rank's node and how many bytes it has at most."""
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
