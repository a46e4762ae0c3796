# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers' Trainer in the background.

    from ioshape.transformers import IoshapeAsyncTrainer

    trainer = IoshapeAsyncTrainer(model, arguments, train_dataset=data)

Training waits until all that is saved has been copied in memory. The checkpoint appears as a whole
when it is on stable storage, and then old ones go. Without this module, Trainer's checkpoints
appear as a whole under "ioshape run", or after ioshape.patch(safetensors=True); training waits.
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
    """For classes derived from Trainer: `class Mine(IoshapeAsyncCheckpoints, Seq2SeqTrainer)`.

    A checkpoint that fails raises from the next one, or at the end of train(). Each waits for the
    one before.
    """

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        wait_for_checkpoints()
        with patched(load=False, safetensors=True), in_background():
            super()._save_checkpoint(*arguments, **named)  # type: ignore[misc] # Trainer's

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        wait_for_checkpoints()  # the best one is loaded, others are removed
        return super()._finalize_training(*arguments, **named)  # type: ignore[misc]

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Trains as Trainer does; all checkpoints are durable when it returns.

        Args:
            arguments: Trainer's.
            named: Trainer's.

        Raises:
            StorageError: a checkpoint could not be written.
        """
        try:
            return super().train(*arguments, **named)  # type: ignore[misc]
        finally:
            wait_for_checkpoints()


class IoshapeAsyncTrainer(IoshapeAsyncCheckpoints, Trainer):  # type: ignore[misc] # whichever it is
    """Trainer, with checkpoints in the background."""
