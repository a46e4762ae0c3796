# SPDX-License-Identifier: Apache-2.0
"""Make the package torch_checkpointing use ioshape's storage for local filesystems."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from types import ModuleType


def follow(filesystem: ModuleType, *, load: bool) -> None:  # noqa: ARG001 - files are read as before
    """Replace the storage. "ioshape run" calls this when its module has been imported."""
    if not is_tested("torch_checkpointing"):
        return
    theirs = filesystem.LocalFileSystemStorageConfig
    by_package = theirs.create_storage

    @functools.wraps(by_package)
    def create_storage(self: Any) -> Any:
        if type(self) is not theirs:  # a class of the program
            return by_package(self)
        return import_module("ioshape.torch_checkpointing").Storage(self)

    theirs.create_storage = create_storage
