# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model on several nodes; all ranks together make one checkpoint.

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        --rdzv-id NAME examples/group_train.py FOLDER

on each of two nodes that share FOLDER; HOST is one of them. On a single one:

    torchrun --standalone --nproc-per-node 4 examples/group_train.py FOLDER

All that the ranks of training.py have to save is one generation, a folder FOLDER/step-0000000010
with one file for each node (--mode says otherwise), which is there as a whole or not at all.
Started again, the training goes on from the newest one.

In examples/train.py each rank has files of its own; `diff` shows what changes.
"""

import argparse
from typing import Any

import ioshape
from training import KEEP, Training, command_line, train


class Rank(Training):
    """How it saves, with all other ranks, and resumes."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        # The cluster wants its node back: after the next step all ranks save and end.
        self.notice = ioshape.on_preemption(options.deadline, file=options.stop_file)

    def told_to_stop(self) -> bool:
        """Whether this rank was told."""
        return bool(self.notice)

    def time_left(self) -> float:
        """For the last save, in seconds: also on a rank that was not told itself."""
        return self.options.deadline if self.notice.left is None else self.notice.left

    def save(self) -> None:
        """This rank's part of a generation, written while the training goes on, but the last."""
        generation = (self.state(), self.options.folder, self.step)
        how: dict[str, Any] = {"mode": self.options.mode, "keep_last": KEEP}
        if self.stopping:
            self.say(f"  {ioshape.save_group(*generation, **how, deadline=self.time_left())}")
            return
        self.finish_save()
        self.saving = ioshape.save_group_async(*generation, **how)

    def resume(self) -> None:
        """Takes up the newest generation, if there is one: the same on all ranks."""
        try:
            state = ioshape.load_group(self.options.folder)
        except FileNotFoundError:
            return
        of_rank_0 = state
        if self.rank != 0:
            of_rank_0 = ioshape.load_group(self.options.folder, step=state["step"], rank=0)
        self.restore(state, of_rank_0)


if __name__ == "__main__":
    parser = command_line()
    parser.add_argument("--mode", choices=("auto", "each", "node", "rank0"), default="auto")
    parser.add_argument(
        "--deadline", type=float, default=25, metavar="S", help="after SIGTERM or SIGUSR1"
    )
    parser.add_argument("--stop-file", metavar="FILE", help="that says the same when it appears")
    train(Rank, parser.parse_args())
