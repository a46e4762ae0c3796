# SPDX-License-Identifier: Apache-2.0
"""Test which ranks of ioshape.dcp write one file, and where each rank's part begins."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ioshape._integrations.dcp import writer as items
from ioshape._integrations.dcp import writer as planned
from ioshape._integrations.dcp.writer import Node, Share, shares
from ioshape._save.atomic import PART_UNIT, Part


def test_64_ranks_on_8_nodes_write_8_files() -> None:
    asked: list[tuple[Node | None, int]] = [
        (Node(str(rank // 8)), (rank + 1) * 700_000) for rank in range(64)
    ]
    found = shares(asked)
    assert {share.file for share in found if share} == {
        f"__{first}_0.distcp" for first in range(0, 64, 8)
    }
    for first in range(0, 64, 8):
        parts = [share.part for share in found[first : first + 8] if share]
        assert len(parts) == 8
        ends = [0, *(part.offset + part.n_bytes for part in parts)]
        assert [part.offset for part in parts] == ends[:-1]  # no gap and no overlap
        assert {part.file_bytes for part in parts} == {ends[-1]}
        for part, (_node, n_bytes) in zip(parts, asked[first:], strict=False):
            assert part.offset % PART_UNIT == part.n_bytes % PART_UNIT == 0
            assert n_bytes <= part.n_bytes < n_bytes + PART_UNIT


def test_who_has_nothing_to_write_or_says_no_node_has_no_share() -> None:
    node = Node("n")
    found = shares([(node, 0), (None, 5), (node, 5), (node, PART_UNIT)])
    assert found[:2] == [None, None]
    assert [share.file for share in found[2:] if share] == ["__2_0.distcp", "__2_0.distcp"]
    assert shares([]) == []


@pytest.mark.parametrize(
    ("mode", "node"),
    [("", None), ("auto", None), ("each", None), ("node", Node("7")), ("rank0", Node(""))],
)
def test_the_mode_of_groups_says_who_writes_one_file(
    monkeypatch: pytest.MonkeyPatch, mode: str, node: Node | None
) -> None:
    monkeypatch.setenv("IOSHAPE_MODE", mode)
    monkeypatch.setenv("IOSHAPE_TEST_NODE", "7")
    assert planned.own_node() == node


def shares_for(planner: Any, state: dict[str, Any]) -> list[Share | None]:
    """Return the share of the only saving rank, as DCP asks for it."""
    planner.set_up_planner(state, is_coordinator=True)
    plan = replace(planner.create_local_plan(), storage_data=Node("n"))
    plans, _ = planner.create_global_plan([plan])
    found = planned.shares_of(plans)
    planner.finish_plan(plans[0])
    return found


@pytest.mark.parametrize("below", [0, 100, 200, 500, 900, 1023, 1024, 1025, 1200, 1300, 2000])
def test_what_ends_just_below_the_end_of_a_part_stays_in_it(below: int) -> None:
    # With this length the planned size of one item is close to the end of a part.
    n_bytes = 4 * PART_UNIT - planned.most_bytes(4 * PART_UNIT) % PART_UNIT - below
    state = {"w": torch.ones(n_bytes, dtype=torch.uint8)}
    planner = dcp.DefaultSavePlanner()
    share = shares_for(planner, state)[0]
    assert share is not None
    (item,) = planner.plan.items
    most, _ = items._writer_of(item, planner.resolve_data(item))
    assert most <= share.part.n_bytes


class _Other(dcp.DefaultSavePlanner):
    """A planner with its own plans."""


@pytest.mark.skipif(
    not hasattr(dcp.SavePlanner, "_cached_global_plan"), reason="this torch keeps no plans"
)
def test_plans_that_dcp_keeps_are_those_of_the_same_save(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(dcp.SavePlanner, f"_cached_{name}", {})
    little, much = {"w": torch.ones(1 << 18)}, {"w": torch.ones(5 << 18)}

    def keeping(kind: Any, state: dict[str, Any]) -> list[Share | None]:
        return shares_for(kind(enable_plan_caching=True), state)

    share = Share("__0_0.distcp", Part(0, 2 * PART_UNIT, 2 * PART_UNIT))
    assert keeping(dcp.DefaultSavePlanner, little) == [share]
    assert keeping(dcp.DefaultSavePlanner, little) == [share]
    # A save without cached plans does not use them.
    assert shares_for(dcp.DefaultSavePlanner(), much) != [share]
    assert keeping(dcp.DefaultSavePlanner, little) == [share]
    # With two kinds of planners it is unknown whose plan is unchanged.
    assert keeping(_Other, much) != [share]
    assert keeping(dcp.DefaultSavePlanner, little) == [None]
