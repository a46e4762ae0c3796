# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on several nodes. All ranks together save one checkpoint.

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        --rdzv-id NAME examples/group_train.py FOLDER

runs on each of two nodes that share FOLDER. HOST is one of the two nodes. On a single node:

    torchrun --standalone --nproc-per-node 4 examples/group_train.py FOLDER

A checkpoint holds the state of all ranks. It is a folder such as FOLDER/step-0000000010 with one
file for each node; --mode chooses other files. A checkpoint is complete or does not exist. When you
start the script again, the training resumes from the newest checkpoint.

In examples/train.py each rank writes its own files. `diff` shows the differences.
"""

import argparse
from typing import Any

import ioshape
from training import KEEP, Training, command_line, train


class Rank(Training):
    """A rank that saves and resumes together with all other ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        # The cluster wants its node back: after the next step all ranks save and exit.
        self.notice = ioshape.on_preemption(options.deadline, file=options.stop_file)

    def told_to_stop(self) -> bool:
        """Return whether this rank received a preemption notice."""
        return bool(self.notice)

    def time_left(self) -> float:
        """Return the seconds left for the last save, also on a rank that received no notice."""
        return self.options.deadline if self.notice.left is None else self.notice.left

    def save(self) -> None:
        """Save this rank's share of a checkpoint, in the background except for the last save."""
        checkpoint = (self.state(), self.options.folder, self.step)
        how: dict[str, Any] = {"mode": self.options.mode, "keep_last": KEEP}
        if self.stopping:
            self.tell_save(ioshape.save_group(*checkpoint, **how, deadline=self.time_left()))
            return
        self.finish_save()
        self.saving = ioshape.save_group_async(*checkpoint, **how)

    def resume(self) -> None:
        """Resume from the newest checkpoint, if there is one. All ranks load the same step."""
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
        "--deadline", type=float, default=25, metavar="S", help="to save after SIGTERM or SIGUSR1"
    )
    parser.add_argument("--stop-file", metavar="FILE", help="acts as SIGTERM when it appears")
    train(Rank, parser.parse_args())
