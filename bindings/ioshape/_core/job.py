# SPDX-License-Identifier: Apache-2.0
"""Which rank of which job this process is."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from ioshape._native import ffi, lib


class Job(NamedTuple):
    """The place of this process in its job."""

    rank: int
    world_size: int
    #: among the ranks of this node
    local_rank: int
    local_world_size: int
    #: the name of this machine
    node: str
    #: what all ranks of the job have in common; "" if nobody says
    id: str
    #: who said so: "torch.distributed", "torchrun", "slurm", "openmpi", "mpich", "pmi", or "alone"
    source: str


#: For tests and "ioshape bench", which play several nodes on one host. The library reads it, too.
PLAYED_NODE = "IOSHAPE_TEST_NODE"


def node_name() -> str:
    """The name of this machine, or of the node that it plays."""
    return os.environ.get(PLAYED_NODE) or os.uname().nodename


def _from_launcher() -> Job:
    found = ffi.new("struct base_job *")
    lib.base_job_find(found)
    return Job(
        found.rank,
        found.ranks,
        found.local_rank,
        found.local_ranks,
        node_name(),
        os.fsdecode(ffi.string(found.id)),
        ffi.string(found.launcher).decode(),
    )


def _from_distributed(launched: Job) -> Job | None:
    # Whoever has not imported it has no process group either.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return launched._replace(rank=rank, world_size=size, source="torch.distributed")


def started_together() -> bool:
    """Whether multiprocessing has started this rank, and so others beside it on this host.

    torch.multiprocessing.spawn() does, and sets none of a launcher's variables.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return False
    place = job()
    # Not a worker that loads data for a rank.
    return place.source == "torch.distributed" and place.world_size > 1


def job() -> Job:
    """Which rank of which job this is: from torch.distributed, torchrun, Slurm, MPI or PMI.

    An initialised process group knows best; otherwise the variables of the launcher are asked.
    """
    launched = _from_launcher()
    return _from_distributed(launched) or launched
