# SPDX-License-Identifier: Apache-2.0
"""One rank of a storm: a process with tensors that it saves in the way that it is told."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ioshape
from ioshape import _torch as original
from ioshape.cli.bench.contest import make_state
from ioshape.cli.bench.crowd import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from ioshape import Report

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI", "SLURM_", "MPI_", "TORCHELASTIC_")
_DEFAULT_STAGING_BYTES = 64 << 20

#: Settings that would make it another storm: the plan says which node a rank is on, recording costs
#: time, and a save that is skipped measures nothing.
_FALSIFYING = ("IOSHAPE_TEST_NODE", "IOSHAPE_TRACE", "IOSHAPE_FULL")


class Order(NamedTuple):
    """What all ranks are told: save so, then, there."""

    way: str
    folder: str
    step: int
    at_ns: int


@dataclass
class Saved:
    """What one rank did; moments are those of now_ns()."""

    begin_ns: int
    #: when the thread that trains went on
    returned_ns: int
    end_ns: int
    #: the report as a dictionary; None of torch.save
    report: dict[str, Any] | None = None
    #: (phase, begin, end) where no report tells
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class Place:
    """Which rank of which job this is."""

    rank: int
    ranks: int
    nodes: int
    #: names the job, and no other
    token: str
    n_bytes: int


def rank(place: Place) -> Callable[[Connection], None]:
    """What such a process does."""

    def work(connection: Connection) -> None:
        _become(place)
        torch.manual_seed(place.rank)
        state = make_state(place.n_bytes)
        connection.send("ready")
        while True:
            order: Order = connection.recv()
            time.sleep(max(0, order.at_ns - now_ns()) / 1e9)
            connection.send(_WAYS[order.way](state, place, order))

    return work


def _become(place: Place) -> None:
    """As a launcher would have started it."""
    torch.set_num_threads(1)
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS) or name in ("MASTER_ADDR", "MASTER_PORT", *_FALSIFYING):
            del os.environ[name]
    ranks_of_a_node = place.ranks // place.nodes
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.ranks),
        LOCAL_RANK=str(place.rank % ranks_of_a_node),
        LOCAL_WORLD_SIZE=str(ranks_of_a_node),
        TORCHELASTIC_RUN_ID=place.token,
    )
    if place.nodes > 1:
        os.environ["IOSHAPE_TEST_NODE"] = f"node-{place.rank // ranks_of_a_node}"
    # A host usually has memory for its ranks; on this one there may be more than are usual.
    if not os.environ.get("IOSHAPE_STAGING_BYTES"):
        ioshape.configure(staging_bytes=2 * place.n_bytes + _DEFAULT_STAGING_BYTES)


State = dict[str, torch.Tensor]


def _file(place: Place, order: Order) -> str:
    return str(Path(order.folder) / f"step-{order.step}-rank-{place.rank:05d}.pt")


def _by_torch(state: State, place: Place, order: Order) -> Saved:
    path = _file(place, order)
    begin = now_ns()
    original.save(state, path)
    written = now_ns()
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    end = now_ns()
    return Saved(begin, end, end, None, [("write", begin, written), ("sync", written, end)])


def _by_save(state: State, place: Place, order: Order) -> Saved:
    begin = now_ns()
    report = ioshape.save(state, _file(place, order), durable=True)
    end = now_ns()
    return Saved(begin, end, end, _told(report))


def _by_save_async(state: State, place: Place, order: Order) -> Saved:
    begin = now_ns()
    handle = ioshape.save_async(state, _file(place, order), durable=True)
    returned = now_ns()
    report = handle.result()
    return Saved(begin, returned, now_ns(), _told(report))


def _by_group(mode: str) -> Callable[[State, Place, Order], Saved]:
    def save(state: State, _place: Place, order: Order) -> Saved:
        begin = now_ns()
        report = ioshape.save_group(state, order.folder, order.step, mode=mode)
        end = now_ns()
        return Saved(begin, end, end, _told(report))

    return save


def _told(report: Report) -> dict[str, Any]:
    if report.skipped:
        raise RuntimeError(f"the save to {report.path} was skipped")
    return asdict(report)


_WAYS = {
    "torch": _by_torch,
    "save": _by_save,
    "async": _by_save_async,
    "node": _by_group("node"),
    "rank0": _by_group("rank0"),
}
