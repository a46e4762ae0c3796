# SPDX-License-Identifier: Apache-2.0
"""Storage for the package torch_checkpointing, which torchtitan uses.

Example:

    from torch_checkpointing import CheckpointManager
    from ioshape.torch_checkpointing import StorageConfig

    manager = CheckpointManager(CheckpointManager.Config(storage_config=StorageConfig()))

The package writes to a directory under a temporary name and then renames it. With this storage each
file is on stable storage before the rename, and the rename is durable when it returns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_checkpointing.storage import filesystem

from ioshape._core.config import is_durable
from ioshape._save.atomic import AtomicFile, sync
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Storage", "StorageConfig"]


@dataclass
class StorageConfig(filesystem.LocalFileSystemStorageConfig):  # type: ignore[misc] # see pyproject
    """Storage configuration, for CheckpointManager.Config(storage_config=…).

    Files are written durably, past the page cache, while the writer holds a slot; see
    ioshape.configure(). `use_direct_io` applies to reading only.
    """

    use_direct_io: bool = False

    def create_storage(self) -> Storage:
        """Return the storage of this configuration. The package calls it."""
        return Storage(self)


class Storage(filesystem.LocalFileSystemStorage):  # type: ignore[misc] # see pyproject
    """Storage on mounted filesystems that writes its files through ioshape."""

    def stream_write(self, path: Path) -> Any:
        """Return a file that appears under its name when it is closed, and is dropped otherwise."""
        return AtomicFile(SaveRequest.of(os.fspath(path)))

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file."""
        with self.stream_write(path) as file:
            file.write(data)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename a file or a directory durably."""
        super().rename(src_path, dst_path, is_directory, background_cleanup)
        if is_durable(None):
            for folder in {path.absolute().parent for path in (dst_path, src_path)}:
                if folder.is_dir():
                    sync(str(folder))
