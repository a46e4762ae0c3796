# SPDX-License-Identifier: Apache-2.0
"""The package torch_checkpointing, which torchtitan uses, with files of ours.

    from torch_checkpointing import CheckpointManager
    from ioshape.torch_checkpointing import StorageConfig

    manager = CheckpointManager(CheckpointManager.Config(storage_config=StorageConfig()))

It writes to a directory under a temporary name and then renames that: here each file is on stable
storage before, and the rename when it returns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_checkpointing.storage import filesystem

from ioshape._core.config import is_durable
from ioshape._save.atomic import AtomicFile
from ioshape._save.directory import sync
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Storage", "StorageConfig"]


@dataclass
class StorageConfig(filesystem.LocalFileSystemStorageConfig):  # type: ignore[misc] # see pyproject
    """For CheckpointManager.Config(storage_config=…).

    Files are written past the page cache, in the writers' turn, and durably: see
    ioshape.configure(). `use_direct_io` is for reading.
    """

    use_direct_io: bool = False

    def create_storage(self) -> Storage:
        """As the package calls it."""
        return Storage(self)


class Storage(filesystem.LocalFileSystemStorage):  # type: ignore[misc] # see pyproject
    """Local filesystems, with files of ours."""

    def stream_write(self, path: Path) -> Any:
        """A file that appears when it is closed; one that is not closed is dropped."""
        return AtomicFile(os.fspath(path), SaveRequest.of())

    def write(self, path: Path, data: Any) -> None:
        """All of a file."""
        with self.stream_write(path) as file:
            file.write(data)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Gives a file or a directory its name, durably."""
        super().rename(src_path, dst_path, is_directory, background_cleanup)
        if is_durable(None):
            for folder in {path.absolute().parent for path in (dst_path, src_path)}:
                if folder.is_dir():
                    sync(str(folder))
