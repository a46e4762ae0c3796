# SPDX-License-Identifier: Apache-2.0
"""Opening of files under descriptor numbers above those of the standard streams."""

from __future__ import annotations

import fcntl
import io
import os

_FIRST = 3  # the first number after stdin, stdout and stderr


def is_pythons(file: object) -> bool:
    """Return whether an object is a file object of Python's own.

    torch needs only write() and flush() of other file objects. Their other attributes may raise
    anything, so callers must not read them.
    """
    return isinstance(file, io.IOBase) or type(file).__module__ == "tempfile"


def open_file(path: str, flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
    """Open a file as os.open() does, but never under the number of a standard stream.

    If the program has closed a standard stream, the kernel would give its number to the new file.
    Code that prints to that stream would then write into the file.
    """
    descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    if descriptor >= _FIRST:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    finally:
        os.close(descriptor)
