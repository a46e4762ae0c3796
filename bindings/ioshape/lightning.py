# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Lightning, saved as safely as all others.

    from ioshape.lightning import IoshapeAsyncCheckpointIO

    trainer = Trainer(plugins=[IoshapeAsyncCheckpointIO()])

Under "ioshape run" an unchanged script saves this way. Strategies that save through
torch.distributed.checkpoint (FSDP, ModelParallel) take no such plug-in: see ioshape.dcp.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401 # isort: skip # first of all, as in ioshape.dcp

from ioshape._integrations.lightning import files
from ioshape._integrations.lightning.original import find_torch_io
from ioshape._save.save import save, save_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._save.handle import SaveHandle

__all__ = ["IoshapeAsyncCheckpointIO", "IoshapeCheckpointIO"]

# For type checkers, that of the whole of Lightning.
if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _TorchCheckpointIO
else:
    _TorchCheckpointIO = find_torch_io()


class IoshapeCheckpointIO(_TorchCheckpointIO):
    """Saves through ioshape.save(), loads through ioshape.load().

    A checkpoint is on stable storage when save_checkpoint() returns. What has a URL ("s3://...")
    is left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint.

        Args:
            checkpoint: of model and trainer.
            path: of the file; its directory is made.
            storage_options: for URLs only.
        """
        files.save(super().save_checkpoint, self._save, checkpoint, path, storage_options)

    def _save(self, checkpoint: dict[str, Any], path: str) -> None:
        save(checkpoint, path, tier=False)  # Lightning removes those that it sees

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = files.as_it_was,
        weights_only: bool | None = None,
    ) -> Any:
        """Loads and verifies a checkpoint.

        Args:
            path: of the file.
            map_location: as in torch.load.
            weights_only: as in torch.load.
        """
        self._settle(path)
        return files.load(super().load_checkpoint, path, map_location, weights_only)

    def _settle(self, _path: str | os.PathLike[str]) -> None:
        """Before a checkpoint is loaded or removed: here none is on its way."""


class IoshapeAsyncCheckpointIO(IoshapeCheckpointIO):
    """Saves through ioshape.save_async(): training waits for one copy in memory.

    A save that fails raises from the next call for a checkpoint, or when the trainer ends. Whoever
    loads or removes a checkpoint that is being written waits for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._under_way: dict[str, SaveHandle] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_under_way": {}}  # another process has none

    def _save(self, checkpoint: dict[str, Any], path: str) -> None:
        for done in [path for path, handle in self._under_way.items() if handle.done()]:
            self._wait_for(done)
        self._under_way[path] = save_async(checkpoint, path, tier=False)

    def _settle(self, path: str | os.PathLike[str]) -> None:
        self._wait_for(files.local_path(path))

    def _wait_for(self, path: str | None) -> None:
        handle = self._under_way.pop(path or "", None)
        if handle is not None:
            handle.wait()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, which may be on its way.

        Args:
            path: of the file.
        """
        self._settle(path)
        super().remove_checkpoint(os.fspath(path))

    def teardown(self) -> None:
        """Waits for all that is under way.

        Raises:
            StorageError: a save failed. The others have been waited for.
        """
        super().teardown()
        failed: Exception | None = None
        for path in list(self._under_way):
            try:
                self._wait_for(path)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
