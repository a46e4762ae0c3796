# SPDX-License-Identifier: Apache-2.0
"""One rank of a bench: a process with tensors that it saves in the way that it is told."""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ioshape
from ioshape import _torch as original
from ioshape._cli.bench import ceiling
from ioshape._cli.bench.crowd import by_the_clock, now_ns
from ioshape._core import config, context

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from ioshape import Report

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI", "SLURM_", "MPI_", "TORCHELASTIC_")
_DEFAULT_STAGING_BYTES = 64 << 20
_RANDOM_ITEMS = 4 << 20

#: Settings that would make it another bench: the plan says which node a rank is on, recording costs
#: time, and a save that is skipped measures nothing.
_FALSIFYING = ("IOSHAPE_TEST_NODE", "IOSHAPE_TRACE", "IOSHAPE_FULL")


class Order(NamedTuple):
    """What all ranks are told: save so, then."""

    way: str
    step: int
    at_ns: int


@dataclass
class Saved:
    """What one rank did; moments are those of now_ns()."""

    begin_ns: int
    #: when the thread that trains went on
    returned_ns: int
    end_ns: int
    #: the report as a dictionary; None if ioshape did not save
    report: dict[str, Any] | None = None
    #: (phase, begin, end) where no report tells
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    #: of the rank's process
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """Which rank of which job this is."""

    rank: int
    ranks: int
    node: int
    nodes: int
    #: names the job, and no other
    token: str
    n_bytes: int
    #: has a folder for each way
    folder: Path
    #: other jobs save at the same time
    one_of_several: bool = False


State = dict[str, torch.Tensor]


def make_state(n_bytes: int) -> State:
    """The parameters of a transformer, as many layers as fit, with values that do not compress."""
    items = n_bytes // 4
    hidden = 16
    while 12 * (2 * hidden) ** 2 * 4 <= items and hidden < 4096:
        hidden *= 2
    shapes = {
        "attention.qkv.weight": (3 * hidden, hidden),
        "attention.out.weight": (hidden, hidden),
        "norm.weight": (hidden,),
        "mlp.up.weight": (4 * hidden, hidden),
        "mlp.down.weight": (hidden, 4 * hidden),
    }
    values = torch.empty(min(items, _RANDOM_ITEMS)).uniform_(-1, 1)
    layers, left = divmod(items, sum(math.prod(shape) for shape in shapes.values()))
    state = {
        f"layers.{layer}.{name}": _filled(shape, values)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    if left:
        state["embedding.weight"] = _filled((left,), values)
    return state


def _filled(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape)
    for part in torch.split(tensor.view(-1), len(values)):
        part.copy_(values[: len(part)])
    return tensor


def rank(place: Place) -> Callable[[Connection], None]:
    """What such a process does."""

    def work(connection: Connection) -> None:
        _become(place)
        torch.manual_seed(place.rank)
        state = make_state(place.n_bytes)
        connection.send("ready")
        while True:
            order: Order = connection.recv()
            context.adopt(_context(_COORDINATORS.get(order.way)), config.generation())
            time.sleep(by_the_clock(max(0, order.at_ns - now_ns()) / 1e9))
            cpu_s = time.process_time()
            saved = _WAYS[order.way](state, place, order)
            saved.cpu_s = time.process_time() - cpu_s
            connection.send(saved)

    return work


def _become(place: Place) -> None:
    """As a launcher would have started it."""
    if place.ranks > 1:
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
        IOSHAPE_UNCHANGED="ignore",  # all save the same state again and again
    )
    # That a save waits for its slot is measured; a line for each would hide the result.
    logging.getLogger("ioshape").addHandler(logging.NullHandler())
    if place.one_of_several:
        # All of these jobs inherit the variables of a batch system; this one wins over them.
        os.environ["IOSHAPE_JOB"] = place.token
    if place.nodes > 1:
        os.environ["IOSHAPE_TEST_NODE"] = f"node-{place.node}"
    # A host usually has memory for its ranks; on this one there may be more than are usual.
    if not os.environ.get("IOSHAPE_STAGING_BYTES"):
        ioshape.configure(staging_bytes=2 * place.n_bytes + _DEFAULT_STAGING_BYTES)


def _file(place: Place, order: Order) -> Path:
    return place.folder / order.way / f"step-{order.step}-rank-{place.rank:05d}.pt"


def _by_torch(sync: bool) -> Callable[[State, Place, Order], Saved]:
    def save(state: State, place: Place, order: Order) -> Saved:
        path = _file(place, order)
        begin = now_ns()
        original.save(state, path)
        written = now_ns()
        if sync:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        end = now_ns()
        return Saved(begin, end, end, None, [("write", begin, written), ("sync", written, end)])

    return save


def _by_save(state: State, place: Place, order: Order) -> Saved:
    begin = now_ns()
    report = ioshape.save(state, _file(place, order), durable=True)
    end = now_ns()
    return Saved(begin, end, end, _told(report))


@cache
def _context(coordinator: str | None) -> context.Context:
    """Return the context for saves with this coordinator, or with that of the settings."""
    return context.Context(coordinator=coordinator)


def _by_save_async(state: State, place: Place, order: Order) -> Saved:
    begin = now_ns()
    handle = ioshape.save_async(state, _file(place, order), durable=True)
    returned = now_ns()
    report = handle.result()
    return Saved(begin, returned, now_ns(), _told(report))


def _by_group(mode: str) -> Callable[[State, Place, Order], Saved]:
    def save(state: State, place: Place, order: Order) -> Saved:
        begin = now_ns()
        report = ioshape.save_group(state, place.folder / order.way, order.step, mode=mode)
        end = now_ns()
        return Saved(begin, end, end, _told(report))

    return save


def _told(report: Report) -> dict[str, Any]:
    if report.skipped:
        raise RuntimeError(f"the save to {report.path} was skipped")
    told = asdict(report)
    # As now_ns() would have measured them.
    return {
        name: value / by_the_clock(1) if name.endswith("_s") else value
        for name, value in told.items()
    }


#: Chosen in the round that does not count.
_writers: list[ceiling.Writer] = []


def _by_ceiling(_state: State, place: Place, order: Order) -> Saved:
    path = _file(place, order)
    if not _writers:
        _writers.append(ceiling.choose(path, place.n_bytes))
    begin = now_ns()
    end = begin + round(_writers[0].write(path, place.n_bytes) * 1e9)  # preparing is not counted
    return Saved(begin, end, end, None, [("write", begin, end)])


_WAYS = {
    "torch": _by_torch(sync=True),
    "buffered": _by_torch(sync=False),
    "save": _by_save,
    "async": _by_save_async,
    "open": _by_save_async,
    "node": _by_group("node"),
    "rank0": _by_group("rank0"),
    "ceiling": _by_ceiling,
}

#: of ways that do not use the coordinator of the settings
_COORDINATORS = {"open": "open"}
