# SPDX-License-Identifier: Apache-2.0
"""`with open(path, "wb") as file: torch.save(obj, file)`: recognised, and saved as to the path.

What was there before is gone since the file was opened. From then on readers see the empty file,
and then all of the new one.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import TYPE_CHECKING, Any

from ioshape._core.descriptors import open_file

if TYPE_CHECKING:
    from collections.abc import Iterator


def path_of(file: Any) -> str | None:
    """Where it lies, if somebody has opened it to write and has written nothing: nobody is to see
    anything in it yet, so another file can take its place."""
    if type(file) is not io.BufferedWriter or type(file.raw) is not io.FileIO or file.closed:
        return None
    path = file.name
    if file.raw.mode not in ("wb", "xb") or not isinstance(path, str):
        return None
    try:
        opened, named = os.fstat(file.fileno()), os.lstat(path)
        is_new = stat.S_ISREG(opened.st_mode) and not file.tell() and not opened.st_size
    except OSError:
        return None
    is_there = os.path.samestat(opened, named) and opened.st_nlink == 1
    return path if is_new and is_there else None


@contextlib.contextmanager
def moved_to(file: Any, path: str) -> Iterator[None]:
    """Around a save to the path: then the owner's file is the new one, and goes on behind it."""
    yield
    descriptor = file.fileno()
    new = open_file(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(new, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(new)
    file.seek(0, os.SEEK_END)
