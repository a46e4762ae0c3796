# SPDX-License-Identifier: Apache-2.0
"""One rank of a storm: a process with tensors that it saves in the way that it is told."""

from __future__ import annotations

import io
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ioshape
from ioshape import _group
from ioshape import _torch as original
from ioshape.cli._children import Line, now_ns, sleep_until
from ioshape.cli._contest import make_state
from ioshape.cli._ways import GROUPS, IN_BACKGROUND, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape import Report

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI", "SLURM_", "MPI_", "TORCHELASTIC_")
_DEFAULT_STAGING_BYTES = 64 << 20

#: Settings that would make it another storm: nodes are the plan's, what is recorded costs time, and
#: what is skipped is no save.
_FALSIFYING = ("IOSHAPE_NODE", "IOSHAPE_TRACE", "IOSHAPE_FULL")


@dataclass(frozen=True)
class Place:
    """Which rank of which job this is."""

    rank: int
    ranks: int
    nodes: int
    #: the job's, and nobody else's
    token: str
    n_bytes: int
    #: where ranks of several nodes meet, if they have to; nothing of it is measured
    meeting: str = ""

    @property
    def ranks_of_a_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def node(self) -> int:
        return self.rank // self.ranks_of_a_node


def rank(place: Place) -> Callable[[Line], None]:
    """What such a process does."""

    def work(line: Line) -> None:
        _become(place)
        member = _Rank(place)
        for request in line.requests():
            line.say(**getattr(member, request.pop("do"))(**request))
        _group.close()

    return work


def _become(place: Place) -> None:
    """As a launcher would have started it."""
    torch.set_num_threads(1)
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS) or name in ("MASTER_ADDR", "MASTER_PORT", *_FALSIFYING):
            del os.environ[name]
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.ranks),
        LOCAL_RANK=str(place.rank % place.ranks_of_a_node),
        LOCAL_WORLD_SIZE=str(place.ranks_of_a_node),
        TORCHELASTIC_RUN_ID=place.token,
    )
    if place.nodes > 1:
        ioshape.configure(node=f"node-{place.node}")
    # As on a host that has memory for its ranks: on this one there may be more than are usual.
    if not os.environ.get("IOSHAPE_STAGING_BYTES"):
        ioshape.configure(staging_bytes=2 * place.n_bytes + _DEFAULT_STAGING_BYTES)
    if place.meeting:
        from torch import distributed  # noqa: PLC0415 - slow, and only here

        distributed.init_process_group(
            "gloo",
            init_method=f"file://{place.meeting}",
            rank=place.rank,
            world_size=place.ranks,
        )


class _Rank:
    """What it has, and what it can be told to do."""

    def __init__(self, place: Place) -> None:
        self.place = place
        torch.manual_seed(place.rank)
        self.state = make_state(place.n_bytes)
        self.state["rank"] = torch.tensor(place.rank)

    def get_ready(self) -> dict[str, Any]:
        """Says that it is."""
        return {"ready": True}

    def save(self, way: str, folder: str, step: int, at_ns: int) -> dict[str, Any]:
        """Saves as soon as the clock says so: when it began and ended, and what it reports."""
        save = self._by_torch if way == TORCH else self._by_ioshape
        target = folder if way in GROUPS else self._file(folder, step)
        sleep_until(at_ns)
        return save(way, target, step)

    def _file(self, folder: str, step: int) -> str:
        return str(Path(folder) / f"step-{step}-rank-{self.place.rank:05d}.pt")

    def _by_torch(self, _way: str, path: str, _step: int) -> dict[str, Any]:
        begin = now_ns()
        original.save(self.state, path)
        written = now_ns()
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
        end = now_ns()
        return {
            "begin_ns": begin,
            "returned_ns": end,
            "end_ns": end,
            "spans": [["write", begin, written], ["sync", written, end]],
            "report": None,
        }

    def _by_ioshape(self, way: str, target: str, step: int) -> dict[str, Any]:
        begin = now_ns()
        report: Report
        if way in IN_BACKGROUND:
            if way in GROUPS:
                handle = ioshape.save_group_async(self.state, target, step, mode=GROUPS[way])
            else:
                handle = ioshape.save_async(self.state, target, durable=True)
            returned = now_ns()
            report = handle.result()
            end = now_ns()
        else:
            if way in GROUPS:
                report = ioshape.save_group(self.state, target, step, mode=GROUPS[way])
            else:
                report = ioshape.save(self.state, target, durable=True)
            returned = end = now_ns()
        if report.skipped:
            raise RuntimeError(f"the save to {report.path} was {report.fallbacks[-1]}")
        return {
            "begin_ns": begin,
            "returned_ns": returned,
            "end_ns": end,
            "report": asdict(report),
        }

    def check(self, way: str, folder: str, step: int) -> dict[str, Any]:
        """Whether stock torch finds in its file what it has saved.

        Raises:
            ValueError: it does not.
        """
        if way in GROUPS:
            generation = next(
                (one for one in ioshape.generations(folder) if one.step == step), None
            )
            if generation is None:
                raise ValueError(f"there is no complete generation of step {step} in {folder}")
            part = generation.parts()[self.place.rank]
            path, offset, n_bytes = part.file, part.offset, part.n_bytes
        else:
            path, offset = self._file(folder, step), 0
            n_bytes = Path(path).stat().st_size
        found = _load(path, offset, n_bytes)
        if not _is_same(self.state, found):
            raise ValueError(f"{path} does not hold what was saved")
        return {"bytes": n_bytes}


def _load(path: str, offset: int, n_bytes: int) -> Any:
    with Path(path).open("rb") as file:
        file.seek(offset)
        content = file.read(n_bytes)
    return original.load(io.BytesIO(content), weights_only=True)


def _is_same(saved: dict[str, torch.Tensor], found: object) -> bool:
    return (
        isinstance(found, dict)
        and list(found) == list(saved)
        and all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    )
