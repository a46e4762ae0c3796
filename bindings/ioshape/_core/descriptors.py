# SPDX-License-Identifier: Apache-2.0
"""Files that Python opens for us, under numbers above those of the standard streams."""

from __future__ import annotations

import fcntl
import io
import os

_FIRST = 3  # behind stdin, stdout and stderr


def is_pythons(file: object) -> bool:
    """Return whether it is a file object of Python.

    torch needs write() and flush() of others: their other attributes may raise anything.
    """
    return isinstance(file, io.IOBase) or type(file).__module__ == "tempfile"


def open_file(path: str, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
    """As os.open(): also where the program closed its streams, whose numbers others may use."""
    descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    if descriptor >= _FIRST:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(descriptor)
