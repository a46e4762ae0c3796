# SPDX-License-Identifier: Apache-2.0
"""Train a small language model (training.py) on several ranks and save by torch.save.

    torchrun --nproc-per-node 4 examples/plain_train.py FOLDER

A second run resumes from the newest common checkpoint.

This script does not use ioshape itself. The same saves go through ioshape if you start it with

    torchrun --nproc-per-node 4 -m ioshape run examples/plain_train.py FOLDER

`diff examples/plain_train.py examples/train.py` shows what ioshape changes in a script.
"""

import argparse
import signal

import torch
from training import TrainingWithFiles, command_line, train


class Rank(TrainingWithFiles):
    """A rank of the training, which saves and resumes."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.told = False
        signal.signal(signal.SIGTERM, self.on_sigterm)

    def on_sigterm(self, _signal: int, _frame: object) -> None:
        """Note that the cluster wants its node back. After the next step all ranks save."""
        self.told = True

    def told_to_stop(self) -> bool:
        """Return whether this rank was told to stop."""
        return self.told

    def save(self) -> None:
        """Save one file for this rank."""
        torch.save(self.state(), self.file(self.step, self.rank))
        self.finish_save()

    def resume(self) -> None:
        """Resume from the newest checkpoint that all ranks have, if there is one."""
        step = self.newest()
        if step is not None:
            state = torch.load(self.file(step, self.rank))
            of_rank_0 = state if self.rank == 0 else torch.load(self.file(step, 0))
            self.restore(state, of_rank_0)


if __name__ == "__main__":
    train(Rank, command_line().parse_args())
