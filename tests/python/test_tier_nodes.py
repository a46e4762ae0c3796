# SPDX-License-Identifier: Apache-2.0
"""Groups of several nodes over tiers: each saves its own files, and a lost one is made up for."""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ioshape
import pytest
from nodes import run_ranks, started_ranks
from records import flip
from tiers import place_of, undrained

BEGIN = "from group_program import *\nimport warnings\nset_up_distributed()\n"

SAVE = (
    BEGIN
    + """
directory, size, *steps = arguments
for step in map(int, steps):
    report = ioshape.save_group(object_of(rank, step, int(size)), directory, step)
    say("saved", step=step, tier=report.tier, mode=report.mode,
        steps=[[one.code, one] for one in report.fallbacks])
torch.distributed.barrier()
"""
)

LOAD = (
    BEGIN
    + """
directory, size, fallback = arguments
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = ioshape.load_group(directory, fallback=fallback == "fallback")
say("loaded", step=found["step"], right=is_right(found, rank, found["step"], int(size)),
    passed=[over.path for one in caught if one.category is ioshape.FallbackWarning
            for over in one.message.passed_over])
torch.distributed.barrier()
"""
)


class Nodes:
    """Nodes with a tier each, and what their ranks save."""

    def __init__(self, folder: Path, nodes: int, per_node: int) -> None:
        self.folder, self.nodes, self.per_node = folder, nodes, per_node
        self.runs = folder / "slow" / "runs"
        self.runs.parent.mkdir()
        self.tiers = [folder / f"fast-{node}" for node in range(nodes)]
        for tier in self.tiers:
            tier.mkdir()

    def run(self, source: str, *arguments: object, **variables: str) -> list[list[dict[str, Any]]]:
        """On all ranks, each with its node's tier."""
        each = {
            rank: {"IOSHAPE_TIER": str(self.tiers[rank // self.per_node])}
            for rank in range(self.nodes * self.per_node)
        }
        return run_ranks(
            self.folder,
            source,
            self.runs,
            *arguments,
            ranks=self.nodes * self.per_node,
            nodes=self.nodes,
            each=each,
            **{"IOSHAPE_EXIT_TIMEOUT_S": "0", "OMP_NUM_THREADS": "1", **variables},
        )

    def place(self, node: int, step: int) -> Path:
        """Of a generation on the tier of a node."""
        return place_of(self.tiers[node], self.runs / f"step-{step:010}")

    def lose(self, *nodes: int) -> None:
        """Others take their places, with nothing on their disks."""
        for node in nodes:
            shutil.rmtree(self.tiers[node])
            self.tiers[node].mkdir()

    @contextmanager
    def undrained(self) -> Iterator[None]:
        """No tier is drained meanwhile."""
        with ExitStack() as stack:
            for tier in self.tiers:
                stack.enter_context(undrained(tier))
            yield


def told(said: list[list[dict[str, Any]]], event: str) -> list[dict[str, Any]]:
    return [line for lines in said for line in lines if line["event"] == event]


def names_in(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "per_node", "parity", "lost"),
    [
        (2, 2, "1/2", (1,)),
        (4, 1, "1/4", (0,)),
        pytest.param(4, 2, "1/2", (0, 3), marks=pytest.mark.long),
        (6, 1, "2/6", (0, 4)),
        pytest.param(5, 1, "2/4", (1, 2), marks=pytest.mark.long),
    ],
)
def test_what_lost_nodes_had_is_restored_from_the_others_alone(
    nodes: int, per_node: int, parity: str, lost: tuple[int, ...], tmp_path: Path
) -> None:
    job = Nodes(tmp_path, nodes, per_node)
    size = 300_000
    with job.undrained():
        said = told(job.run(SAVE, size, 1, IOSHAPE_PARITY=parity), "saved")
        assert [(line["tier"] != "", line["steps"]) for line in said] == [(True, [])] * len(said)
    assert not job.runs.exists() or not any(job.runs.iterdir())
    job.lose(*lost)
    with job.undrained():
        said = told(job.run(LOAD, size, "", IOSHAPE_PARITY=parity), "loaded")
        assert [(line["step"], line["right"]) for line in said] == [(1, True)] * (nodes * per_node)
        assert not any(job.runs.glob("step-*"))
        # They protect each other again: now others may be lost.
        job.lose(next(node for node in range(nodes) if node not in lost))
        said = told(job.run(LOAD, size, "fallback", IOSHAPE_PARITY=parity), "loaded")
        assert [(line["step"], line["right"]) for line in said] == [(1, True)] * (nodes * per_node)


