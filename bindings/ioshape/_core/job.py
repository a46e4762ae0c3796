# SPDX-License-Identifier: Apache-2.0
"""The identity of this process in its job: rank, node and job id."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from ioshape._native import ffi, lib


class Job(NamedTuple):
    """The position of this process in its job."""

    #: The rank of this process in the job, from 0.
    rank: int
    #: The number of ranks of the job.
    world_size: int
    #: The rank among those of this node, from 0.
    local_rank: int
    #: The number of ranks on this node.
    local_world_size: int
    #: The name of this machine.
    node: str
    #: An id that all ranks of the job have in common; "" if the launcher gives none.
    id: str
    #: Where the values come from: "torch.distributed", "torchrun", "slurm", "openmpi", "mpich",
    #: "pmi", or "alone" if there is no launcher.
    source: str


#: The variable by which tests simulate several nodes on one host. The C library reads it as well.
SIMULATED_NODE = "IOSHAPE_TEST_NODE"


def node_name() -> str:
    """Return the name of this machine, or of the node that it simulates."""
    return os.environ.get(SIMULATED_NODE) or os.uname().nodename


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
    # A program that has not imported torch.distributed has no process group. So do not import it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return launched._replace(rank=rank, world_size=size, source="torch.distributed")


def started_together() -> bool:
    """Return whether multiprocessing started this rank, with others of the job on this host.

    torch.multiprocessing.spawn() starts ranks so, and sets none of a launcher's variables.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None:
        return False
    this_job = job()
    # A data loader's worker also has a parent process. But it has no initialised process group.
    return this_job.source == "torch.distributed" and this_job.world_size > 1


def job() -> Job:
    """Return the rank, size and id of the job that this process belongs to.

    The rank and the size come from torch.distributed if its process group is initialised. Otherwise
    they come from the variables of the launcher: torchrun, Slurm, MPI or PMI. A process without a
    launcher is rank 0 of 1.

    Any thread may call this.

    Returns:
        A Job. Its `source` says where the values come from.
    """
    launched = _from_launcher()
    return _from_distributed(launched) or launched
