# SPDX-License-Identifier: Apache-2.0
"""Which rank of which job this process is."""

from __future__ import annotations

import os
import re
import socket
import sys
from typing import NamedTuple


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


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _slurm_local_size() -> int | None:
    """Tasks on this node: SLURM_TASKS_PER_NODE is a list like "4(x2),3", by node."""
    tasks = []
    for count, repeat in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    ):
        tasks += [int(count)] * min(int(repeat or 1), 1 << 20)
    node = _number("SLURM_NODEID")
    return tasks[node] if node is not None and node < len(tasks) else None


# Who launched us, by the variables that it sets: rank, size, both on the node, and the job. What
# srun or mpirun started may start torchrun in turn, so the innermost launcher is asked first.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    (
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_JOB_ID"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    ("pmi", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", "PMIX_NAMESPACE"),
)


def _from_launcher() -> Job | None:
    for source, rank_name, size_name, local_rank_name, local_size_name, id_name in _LAUNCHERS:
        rank, size = _number(rank_name), _number(size_name)
        if rank is None or size is None or rank >= size:
            continue
        local_size = _number(local_size_name) if local_size_name else _slurm_local_size()
        # Slurm's job is the same job whoever starts the ranks inside it.
        job_id = os.environ.get("SLURM_JOB_ID") or os.environ.get(id_name) or ""
        return Job(
            rank,
            size,
            _number(local_rank_name) or 0,
            local_size or 1,
            socket.gethostname(),
            "" if job_id == "none" else job_id,
            source,
        )
    return None


def _from_distributed(launched: Job) -> Job | None:
    # Whoever has not imported it has no process group either.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return launched._replace(rank=rank, world_size=size, source="torch.distributed")


def job() -> Job:
    """Which rank of which job this is: from torch.distributed, torchrun, Slurm, MPI or PMI.

    An initialised process group knows best; otherwise the variables of the launcher are asked.
    """
    launched = _from_launcher() or Job(0, 1, 0, 1, socket.gethostname(), "", "alone")
    return _from_distributed(launched) or launched
