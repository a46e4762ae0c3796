# SPDX-License-Identifier: Apache-2.0
"""CheckpointIO plug-ins for Lightning: durable, atomic, verified checkpoints.

    from ioshape.lightning import IoshapeAsyncCheckpointIO

    trainer = Trainer(plugins=[IoshapeAsyncCheckpointIO()])

"ioshape run" enables them for an unchanged script. Strategies that save through
torch.distributed.checkpoint (FSDP, ModelParallel) do not accept such a plug-in: see ioshape.dcp.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 # isort: skip # first of all, as in ioshape.dcp

from ioshape._core import under_way
from ioshape._integrations.lightning import patching
from ioshape._save.save import save, save_async

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IoshapeAsyncCheckpointIO", "IoshapeCheckpointIO"]

# The whole package, and its older part alone. The first that can be imported is taken.
_PACKAGES = ("lightning.fabric", "lightning_fabric")


def _find_torch_io() -> Any:
    """Return the class that saves checkpoints by default."""
    for name in _PACKAGES:
        try:
            return import_module(f"{name}.plugins.io.torch_io").TorchCheckpointIO
        except ImportError:
            continue
    raise ImportError(
        "ioshape.lightning needs Lightning, which is not installed; install it: "
        "pip install lightning"
    )


# Type checkers see the class of the `lightning` package, whichever package is installed.
if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _TorchCheckpointIO
else:
    _TorchCheckpointIO = _find_torch_io()


class IoshapeCheckpointIO(_TorchCheckpointIO):
    """CheckpointIO that uses ioshape.save() and ioshape.load().

    A checkpoint is on stable storage when save_checkpoint() returns. Lightning itself handles
    checkpoints with a URL ("s3://...").
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: state of model and trainer.
            path: path of the file. Its directory is created.
            storage_options: options for URLs only.
        """
        patching.save(super().save_checkpoint, self._save, checkpoint, path, storage_options)

    def _save(self, checkpoint: dict[str, Any], path: str) -> None:
        # Without a tier: Lightning removes old checkpoints, but only files that it sees.
        save(checkpoint, path, tier=False)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = patching.as_it_was,
        weights_only: bool | None = None,
    ) -> Any:
        """Load and verify a checkpoint.

        Args:
            path: path of the file.
            map_location: as in torch.load.
            weights_only: as in torch.load.
        """
        self._wait_for_save_to(path)
        return patching.load(super().load_checkpoint, path, map_location, weights_only)

    def _wait_for_save_to(self, _path: str | os.PathLike[str]) -> None:
        """Wait for a save to this path before the file is loaded or removed.

        This class saves in the foreground, so there is nothing to wait for.
        """


class IoshapeAsyncCheckpointIO(IoshapeCheckpointIO):
    """CheckpointIO that uses ioshape.save_async(): training waits for one copy in memory.

    If a save fails, the next call for a checkpoint raises, or else the end of the trainer. Loading
    or removing a checkpoint that is being written waits until it is complete.
    """

    def _save(self, checkpoint: dict[str, Any], path: str) -> None:
        save_async(checkpoint, path, tier=False)

    def _wait_for_save_to(self, path: str | os.PathLike[str]) -> None:
        local = under_way.canonical(patching.local_path(path) or "")
        for handle in under_way.all_under_way():
            if handle._canonical_path == local:
                handle.wait()
        under_way.raise_unheard()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint. If it is being written, wait for that first.

        Args:
            path: path of the file.
        """
        self._wait_for_save_to(path)
        super().remove_checkpoint(os.fspath(path))

    def teardown(self) -> None:
        """Wait for all background saves.

        Raises:
            StorageError: a save failed. All saves have ended when it is raised.
        """
        super().teardown()
        under_way.wait_all()
