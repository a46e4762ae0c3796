# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet over gloo, forked from one process, because importing torch takes longer than
their work.

A program calls serve(), and tests call run() with its path. Results of a rank are in
STAGE.RANK.outcomes.
"""

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import Program


def serve(stages: Mapping[str, Callable[[Path, int, int], Any]]) -> None:
    """Run the requested stage in each rank, with the folder, the rank and the number of ranks."""

    stage, folder, variables = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    ranks = []
    for rank, its_own in enumerate(variables):
        ranks.append(os.fork())
        if not ranks[rank]:
            os.environ.update(its_own)
            _be_rank(stages[stage], folder / stage, rank, len(variables))
            return
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks])


def _be_rank(act: Callable[[Path, int, int], Any], name: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{name}.{size}.store"
    # The default backends of each kind of device: NCCL for GPUs.
    dist.init_process_group(init_method=store, rank=rank, world_size=size)
    outcomes = act(name.parent, rank, size)
    dist.barrier()
    dist.destroy_process_group()
    Path(f"{name}.{rank}.outcomes").write_bytes(pickle.dumps(outcomes))


def run(
    program: str,
    stage: str,
    folder: Path,
    size: int,
    variables: Sequence[Mapping[str, str]] = (),
    killed: Collection[int] = (),
) -> list[Any]:
    """Run a stage with these variables for each rank.

    Return the result of each rank, also of ranks that end by a kill.
    """
    given = [
        {"RANK": str(rank), **of_rank} for rank, of_rank in enumerate(variables or [{}] * size)
    ]
    command = [program, stage, str(folder), json.dumps(given)]
    ranks = Program(folder, command, {"GLOO_SOCKET_IFNAME": "lo"})
    try:
        output, errors = ranks.end()
    finally:
        ranks.close()
    expected = [-signal.SIGKILL if rank in killed else 0 for rank in range(size)]
    assert json.loads(output.splitlines()[-1]) == expected, errors[-3000:]
    return [
        pickle.loads((folder / f"{stage}.{rank}.outcomes").read_bytes()) for rank in range(size)
    ]
