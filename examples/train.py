# SPDX-License-Identifier: Apache-2.0
"""Train a small language model (training.py), with background checkpoints by ioshape.

    torchrun --nproc-per-node 4 examples/train.py FOLDER

A second run resumes from the newest common checkpoint.

`diff examples/plain_train.py examples/train.py` shows what ioshape changes in a script.
"""

import argparse

import ioshape
from training import TrainingWithFiles, command_line, train


class Rank(TrainingWithFiles):
    """A rank of the training, which saves and resumes."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        # The cluster wants its node back: after the next step all ranks save and exit.
        self.notice = ioshape.on_preemption(options.deadline, file=options.stop_file)

    def told_to_stop(self) -> bool:
        """Return whether this rank was told to stop."""
        return bool(self.notice)

    def save(self) -> None:
        """Save one file for this rank, in the background except for the last save."""
        file = self.file(self.step, self.rank)
        if self.stopping:
            left = self.notice.left or self.options.deadline  # this rank may not have been told
            self.tell_save(ioshape.save(self.state(), file, deadline=left))
            return
        self.finish_save()
        self.saving = ioshape.save_async(self.state(), file)

    def resume(self) -> None:
        """Resume from the newest checkpoint that all ranks have, if there is one."""
        step = self.newest()
        if step is not None:
            state = ioshape.load(self.file(step, self.rank))
            of_rank_0 = state if self.rank == 0 else ioshape.load(self.file(step, 0))
            self.restore(state, of_rank_0)


if __name__ == "__main__":
    parser = command_line()
    parser.add_argument(
        "--deadline", type=float, default=25, metavar="S", help="to save after SIGTERM"
    )
    parser.add_argument("--stop-file", metavar="FILE", help="acts as SIGTERM when it appears")
    train(Rank, parser.parse_args())
