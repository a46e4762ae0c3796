# SPDX-License-Identifier: Apache-2.0
"""Background checkpoints for the Trainer of transformers.

Example:

    from ioshape.transformers import IoshapeAsyncTrainer

    trainer = IoshapeAsyncTrainer(model, arguments, train_dataset=data)

Training waits only until everything to be saved has been copied in memory. The checkpoint directory
appears atomically when all of it is on stable storage; then old checkpoints are removed. Without
this module, "ioshape run" or ioshape.patch(safetensors=True) makes Trainer's checkpoints atomic,
but training waits for the whole save.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import Trainer
except ImportError as _error:
    raise ImportError(
        "ioshape.transformers needs the package transformers, which is not installed; install it: "
        'pip install "transformers>=5" accelerate'
    ) from _error

from ioshape._integrations.huggingface.whole import wait_for_checkpoints
from ioshape._run.patch import patched
from ioshape._save.collected import in_background

__all__ = ["IoshapeAsyncCheckpoints", "IoshapeAsyncTrainer"]


class IoshapeAsyncCheckpoints:
    """A mixin for classes derived from Trainer.

    Example: `class Mine(IoshapeAsyncCheckpoints, Seq2SeqTrainer)`. Each checkpoint waits for the
    previous one. If a checkpoint fails, the next one raises, or else the end of train().
    """

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        wait_for_checkpoints()
        with patched(load=False, safetensors=True), in_background():
            super()._save_checkpoint(*arguments, **named)  # type: ignore[misc] # Trainer's

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        wait_for_checkpoints()  # Trainer now loads the best checkpoint and removes others
        return super()._finalize_training(*arguments, **named)  # type: ignore[misc]

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as Trainer does. All checkpoints are durable when it returns.

        Args:
            arguments: positional arguments of Trainer.train().
            named: keyword arguments of Trainer.train().

        Raises:
            StorageError: a checkpoint could not be written.
        """
        try:
            return super().train(*arguments, **named)  # type: ignore[misc]
        finally:
            wait_for_checkpoints()


class IoshapeAsyncTrainer(IoshapeAsyncCheckpoints, Trainer):  # type: ignore[misc] # whichever it is
    """A Trainer that saves its checkpoints in the background."""
