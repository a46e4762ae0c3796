# SPDX-License-Identifier: Apache-2.0
"""Save through DCP, by ioshape with one file for each node and by stock.

    frameworks_files_process FOLDER RANKS NODES

prints how many data files each of the two wrote. Stock DCP must load everything that ioshape saved.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import ioshape.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# 3 MiB for each rank, in tensors of several sizes that no other rank has.
SIZES = (1000, 260_000, 520_000)


def state_of(rank: int) -> dict[str, Any]:
    return {f"{rank}.{number}": torch.full((n,), float(rank)) for number, n in enumerate(SIZES)}


def run_rank(folder: Path, rank: int, ranks: int, nodes: int) -> None:
    os.environ["IOSHAPE_MODE"] = "node"
    os.environ["IOSHAPE_TEST_NODE"] = str(rank * nodes // ranks)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    dcp.save(state_of(rank), storage_writer=ioshape.dcp.Writer(folder / "ioshape"))
    dcp.save(state_of(rank), storage_writer=dcp.FileSystemWriter(folder / "stock"))
    dist.destroy_process_group()


def start(folder: Path, rank: int, ranks: int, nodes: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        run_rank(folder, rank, ranks, nodes)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def check(path: Path, ranks: int) -> None:
    wanted: dict[str, Any] = {}
    for rank in range(ranks):
        wanted |= state_of(rank)
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    if not all(torch.equal(found[name], value) for name, value in wanted.items()):
        raise RuntimeError(f"what lies in {path} is not what was saved")


def main() -> None:
    folder, ranks, nodes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pids = [start(folder, rank, ranks, nodes) for rank in range(ranks)]
    ended = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ended):
        raise RuntimeError("a rank failed")
    check(folder / "ioshape", ranks)
    names = {how: list((folder / how).glob("*.distcp")) for how in ("ioshape", "stock")}
    print(json.dumps({how: len(files) for how, files in names.items()}))


if __name__ == "__main__":
    main()
