# SPDX-License-Identifier: Apache-2.0
"""Directories that are filled under a temporary name and then appear complete."""

from __future__ import annotations

import os

from ioshape._core.context import current, encoded
from ioshape._core.descriptors import open_file
from ioshape._core.errors import last_failure
from ioshape._core.structs import Owner
from ioshape._native import ffi, lib


class Directory(Owner):
    """A directory in progress. Without commit() it leaves no trace, even after a kill."""

    def __init__(self, path: str) -> None:
        context = current()
        super().__init__("directory", path, context)
        self.name = path
        if lib.save_directory_make(context.pointer, encoded(path), self._out):
            raise last_failure(path, "save")
        #: temporary path to fill until commit(); other processes may also create files there
        self.path = os.fsdecode(ffi.string(lib.save_directory_path(self._pointer)))

    def commit(self) -> None:
        """Rename the directory to its final name, durably.

        Raise FileExistsError if that name is taken, except by an empty directory.
        """
        if lib.save_directory_commit(self._pointer):
            raise last_failure(self.name, "save")

    def close(self) -> None:
        """Remove the directory unless it was committed."""
        self._let_go()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sync(path: str) -> None:
    """Bring a file, or the names in a directory, to stable storage. Return when it is done."""
    fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
