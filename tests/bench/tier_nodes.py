# SPDX-License-Identifier: Apache-2.0
"""Measure nodes that replace each other's files: bytes that a restart reads, cost of parities."""

import shutil
import subprocess
from typing import Any, NamedTuple

from nodes import run_ranks
from striped import INSTANT, striped
from tiers import undrained_all

from .setting import Figure, Setting
from .slots_turns import programs

#: Bytes of each rank's state.
N_BYTES = 16 << 20

PROGRAM = """
from group_program import *
set_up_distributed()
directory, n_bytes, what = arguments
if what == "save":
    report = ioshape.save_group(object_of(rank, 1, int(n_bytes)), directory, 1)
    assert report.tier and not report.downgrades, report
else:
    begin = time.perf_counter()
    found = ioshape.load_group(directory)
    took = time.perf_counter() - begin
    assert is_right(found, rank, 1, int(n_bytes))
    say("loaded", took=took)
torch.distributed.barrier()
"""


class Case(NamedTuple):
    nodes: int
    parity: str
    lost: tuple[int, ...]


CASES = (Case(4, "1/4", (1,)), Case(6, "2/6", (1, 4)))


def rebuilt(setting: Setting, case: Case) -> tuple[int, float]:
    """Return the bytes read from the destination, and the seconds of the slowest rank's load."""
    tiers = [setting.folder / f"tier-{node}" for node in range(case.nodes)]
    for tier in tiers:
        tier.mkdir()
    each = {node: {"IOSHAPE_TIER": str(tier)} for node, tier in enumerate(tiers)}
    common = {
        "IOSHAPE_PARITY": case.parity,
        "LEAVE_UNDRAINED": "1",
        # Keep messages out of the destination, whose reads are counted.
        "IOSHAPE_TEST_BOARD": "host",
        "OMP_NUM_THREADS": "1",
    }
    parameters: dict[str, Any] = {"targets": 4, **INSTANT}
    with striped(**parameters) as mount, undrained_all(tiers):

        def run(what: str) -> list[float]:
            said = run_ranks(
                setting.folder,
                PROGRAM,
                *(mount.path / "run", N_BYTES, what),
                ranks=case.nodes,
                nodes=case.nodes,
                each=each,
                **common,
            )
            return [line["took"] for lines in said for line in lines if line["event"] == "loaded"]

        run("save")
        for node in case.lost:
            shutil.rmtree(tiers[node])
            tiers[node].mkdir()
        mount.reset()
        took = max(run("load"))
        n_bytes = int(mount.statistics()["reads"]["bytes"])
    for tier in tiers:
        shutil.rmtree(tier)
    return n_bytes, took


def rebuild_figure(setting: Setting) -> Figure:
    found = [rebuilt(setting, case) for case in CASES]
    remarks = [
        f"{len(case.lost)} of {case.nodes} nodes lost: {took:.1f} s for {N_BYTES >> 20} MiB a node"
        for case, (_, took) in zip(CASES, found, strict=True)
    ]
    total = sum(n_bytes for n_bytes, _ in found)
    return Figure("tier_rebuild_shared_bytes", total, "<=", 0, "; ".join(remarks))


def parity_figure(setting: Setting) -> Figure:
    program = programs(setting) / "bench-parity"
    done = subprocess.run([str(program), "4", "2"], capture_output=True, text=True, check=True)
    return Figure("tier_rs_gbs", float(done.stdout), ">=", 5, "4 + 2, from memory, one core")
