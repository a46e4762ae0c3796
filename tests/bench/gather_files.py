# SPDX-License-Identifier: Apache-2.0
"""Count the files and directories of a checkpoint, which metadata servers have to keep."""

from pathlib import Path

from coordinators import coordinator

from .gather_node import settle, steps
from .gather_ranks import c_ranks, open_groups
from .setting import Figure, Outcome, Setting
from .slots_turns import programs

RANKS, NODES = 64, 8
BYTES_EACH = 64 << 10

MOST = {"rank0": 3, "node": 10, "each": 66}


def saved(setting: Setting, address: str, mode: str) -> list[Path]:
    """Return the directory of a checkpoint and what is in it. The messages are in a Redis."""
    directory = setting.folder / "checkpoints"
    setting.clear()
    directory.mkdir()
    with c_ranks(programs(setting) / "bench-worker", RANKS, NODES) as ranks:
        ranks.make_tensors(kind="equal", count=1, each=BYTES_EACH)
        ranks.each("context", IOSHAPE_COORDINATOR=address)
        open_groups(ranks, directory, mode, nodes=NODES, store="redis")
        ranks.each("group_save", step=next(steps))
        settle(setting, directory)
        ranks.each("group_save", step=next(steps))
        ranks.each("group_end")
    return [path for path in directory.rglob("*") if "step-" in str(path.relative_to(directory))]


def measure(setting: Setting, outcome: Outcome) -> None:
    outcome.facts["files"] = {"ranks": RANKS, "nodes": NODES}
    with coordinator("redis") as redis:
        for mode, most in MOST.items():
            setting.say(f"{RANKS} ranks on {NODES} nodes, {mode}: files of a checkpoint")
            names = saved(setting, redis, mode)
            figure = Figure(f"files_{mode}", len(names), "<=", most, "files and directories")
            outcome.figures.append(figure)
    setting.clear()
