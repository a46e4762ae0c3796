# SPDX-License-Identifier: Apache-2.0
"""Start processes that are the ranks of a job, and begin operations at the same moment."""

import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean

from .rounds import Sample
from .worker import Answer, Worker

# Delay in which a command reaches all ranks before they begin.
LEAD_NS = 50_000_000


class Ranks:
    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.tensor_bytes = 0.0  # sum over all ranks
        # for each rank, its file descriptors of sockets to other ranks
        self.ends: list[list[int]] = []

    def each(self, verb: str, **values: str | float | Path) -> list[Answer]:
        """Send the command to one rank after the other. The ranks run it concurrently."""
        for worker in self.workers:
            worker.tell(verb, **values)
        return [worker.hear(verb) for worker in self.workers]

    def together_each(
        self, verb: str, values: Sequence[Mapping[str, str | float | Path]]
    ) -> list[Answer]:
        """Let all ranks begin at the same moment, each with its own values."""
        at = time.monotonic_ns() + LEAD_NS
        for worker, own in zip(self.workers, values, strict=True):
            worker.tell(verb, at=at, **own)
        return [worker.hear(verb) for worker in self.workers]

    def together(self, verb: str, **values: str | float | Path) -> list[Answer]:
        """Let all ranks begin at the same moment."""
        return self.each(verb, at=time.monotonic_ns() + LEAD_NS, **values)

    def make_tensors(self, **values: str | float) -> None:
        self.tensor_bytes = sum(float(one["bytes"]) for one in self.each("tensors", **values))


def all_of(answers: Sequence[Answer], n_bytes: float) -> Sample:
    """Return a sample from the first rank's begin to the last rank's end."""
    began = min(float(one["began_s"]) for one in answers)
    ended = max(float(one["ended_s"]) for one in answers)
    cpu = sum(float(one["cpu_seconds"]) for one in answers)
    return Sample(ended - began, n_bytes, {**answers[0], "cpu_seconds": cpu})


def one_of(answers: Sequence[Answer], n_bytes: float) -> Sample:
    """Return a sample with the mean time of the ranks."""
    return Sample(
        mean(float(one["seconds"]) for one in answers),
        n_bytes / len(answers),
        {
            "cpu_seconds": sum(float(one["cpu_seconds"]) for one in answers),
            "longest_s": max(float(one["seconds"]) for one in answers),
        },
    )


def node_of(rank: int, ranks: int, nodes: int) -> int:
    return rank * nodes // ranks


@contextmanager
def c_ranks(program: Path, count: int, nodes: int = 1) -> Iterator[Ranks]:
    """Start ranks on "nodes" of this machine that differ by name only.

    Bytes between nodes go over sockets, one from each rank to rank 0.
    """
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count - 1)] if nodes > 1 else []
        ends = [[ours.fileno() for ours, _ in pairs], *([theirs.fileno()] for _, theirs in pairs)]
        workers = []
        for rank in range(count):
            workers.append(Worker(program, files=ends[rank] if pairs else ()))
            stack.enter_context(workers[-1])
        for pair in pairs:
            for end in pair:
                end.close()
        ranks = Ranks(workers)
        ranks.ends = ends if pairs else []
        yield ranks


def open_groups(ranks: Ranks, directory: Path, mode: str, *, nodes: int = 1, store: str) -> None:
    """Open a new group, which no other job joins."""
    count, token = len(ranks.workers), uuid.uuid4().hex
    for rank, worker in enumerate(ranks.workers):
        more: dict[str, str] = {}
        if nodes > 1:
            more = {
                "node": f"{token}-{node_of(rank, count, nodes)}",
                "comm": ":".join(map(str, ranks.ends[rank])),
            }
        worker.tell(
            "group",
            path=directory,
            rank=rank,
            ranks=count,
            mode=mode,
            store=store,
            token=token,
            **more,
        )
    for worker in ranks.workers:
        worker.hear("group")
