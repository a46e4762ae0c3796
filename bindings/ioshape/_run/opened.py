# SPDX-License-Identifier: Apache-2.0
"""Detection of saves to a file that was just opened, which are saved to its path instead.

This serves `with open(path, "wb") as file: torch.save(obj, file)`. open() has already discarded the
previous file, so readers see an empty file and then the whole new one.
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
    """Return the path of a file object that was opened for writing and is still empty, else None.

    Such a file can be replaced by another one: readers expect no content in it yet. The result is
    also None if the path now names another file, or the file has other hard links.
    """
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
    """Make a file object refer to the file that the block saves to its path.

    Afterwards the program's descriptor refers to the new file, positioned at its end.

    Args:
        file: the program's file object.
        path: its path, from path_of().
    """
    yield
    descriptor = file.fileno()
    new = open_file(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(new, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(new)
    file.seek(0, os.SEEK_END)
