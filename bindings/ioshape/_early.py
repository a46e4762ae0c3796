# SPDX-License-Identifier: Apache-2.0
"""save() for a signal handler that has interrupted the first use of ioshape.

The other modules of the package are half imported then. So this module imports only
_core/descriptors.py, which "import ioshape" has already imported. Only such a handler imports this
module. torch writes the file, which is still atomic and durable.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import torch

from ioshape._core.descriptors import open_file

if TYPE_CHECKING:
    from collections.abc import Callable

# Marks a temporary file. The zeros say that its lock domain is unknown, so that later saves to the
# directory remove a leftover file only after a day.
_MARK = ".ioshape-tmp-00000000-"


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    *how: Any,
    durable: bool | str | None = None,
    replace: bool = True,
    **named: Any,
) -> SimpleNamespace:
    """Save an object as ioshape.save() does, but without slots, tier and progress.

    The report has only the attributes that are known here.
    """
    begin = time.time()
    for name in ("progress", "deadline", "tier"):
        named.pop(name, None)

    def write(file: str | IO[bytes]) -> None:
        torch.save(obj, file, *how, **named)

    if isinstance(f, (str, os.PathLike)):
        path = os.fspath(f)
        _write(os.path.realpath(path), write, durable=durable is not False, replace=replace)
    else:
        path = str(getattr(f, "name", ""))
        write(f)
    return SimpleNamespace(
        path=path,
        written_by="torch",
        total_s=time.time() - begin,
        started_s=begin,
        skipped=False,
        downgrades=("a signal has interrupted the first use of ioshape: torch wrote the file",),
    )


def _give_mode(created: int, there: os.stat_result) -> None:
    """Give a new file the mode of the file that it replaces, without granting new access.

    Args:
        created: the descriptor of the new file.
        there: the status of the file that it replaces.
    """
    mode, now = stat.S_IMODE(there.st_mode), os.fstat(created)
    if (now.st_uid, now.st_gid) != (there.st_uid, there.st_gid):
        mode &= 0o700
    os.fchmod(created, mode)


def _write(
    path: str, write: Callable[[str | IO[bytes]], None], *, durable: bool, replace: bool
) -> None:
    """Write a temporary file beside the path, then rename it to the path.

    Without `replace` a hard link gives the file its name, which fails if the path exists.
    """
    there = os.stat(path) if os.path.exists(path) else None  # noqa: PTH110, PTH116
    if there is not None and not stat.S_ISREG(there.st_mode):
        write(path)  # a device or a pipe
        return
    folder, name = os.path.split(path)
    temporary = f"{folder}/.{name[:50]}{_MARK}{os.urandom(8).hex()}"
    try:
        created = open_file(
            temporary,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
            0o666 if there is None else 0o600,
        )
        with os.fdopen(created, "wb") as file:
            if there is not None:
                _give_mode(file.fileno(), there)
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)  # noqa: PTH105
        else:
            os.link(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
    if durable:
        directory = open_file(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
