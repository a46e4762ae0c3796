# SPDX-License-Identifier: Apache-2.0
"""open()."""

from __future__ import annotations

import os
from typing import Literal, overload

from ioshape._core.config import tier_folder
from ioshape._load.verified import VerifiedFile
from ioshape._save.atomic import AtomicFile
from ioshape._save.request import SaveRequest
from ioshape._tier.nearest import nearest


@overload
def open(  # noqa: A001 - named as gzip.open is
    path: str | os.PathLike[str],
    mode: Literal["wb"],
    *,
    durable: bool | None = None,
    replace: bool = True,
    deadline: float | None = None,
    expected_bytes: int = 0,
    checksums: bool = False,
) -> AtomicFile: ...
@overload
def open(  # noqa: A001
    path: str | os.PathLike[str], mode: Literal["rb"] = "rb"
) -> VerifiedFile: ...
def open(  # noqa: A001
    path: str | os.PathLike[str],
    mode: str = "rb",
    *,
    durable: bool | None = None,
    replace: bool = True,
    deadline: float | None = None,
    expected_bytes: int = 0,
    checksums: bool = False,
) -> AtomicFile | VerifiedFile:
    """Opens a file in any format, to be written as safely as a checkpoint, or to be read.

    With "wb" the file appears at the path when it is closed: as a whole, on stable storage, in its
    turn among other writers. Use a `with` block: if it ends with an exception the file is dropped,
    and what was there before stays. The same happens to a file that is never closed. torch.save,
    pickle, numpy, zipfile, safetensors and shutil.copyfileobj can write to it.

        with ioshape.open("tokens.npy", "wb") as file:
            numpy.save(file, tokens)

    With "rb" the file is read ahead, and verified where checksums are known: those of ioshape.save
    and torch.save, and those of files that were written with `checksums`, as long as nobody changes
    them. Any number of processes and threads can have a file open. With the setting "tier" it is
    the copy there that is read, unless there is a newer file at the path.

    The settings that follow are for writing.

    Args:
        path: of the file.
        mode: "wb" or "rb".
        durable: as in save().
        replace: as in save().
        deadline: as in save(), from this call on.
        expected_bytes: how much the file will hold, if that is known: a full disk is then noticed
            at once. An estimate is fine.
        checksums: True keeps a checksum of each MiB in a small file beside it,
            `NAME.ioshape-sums`. They are computed while the file is written.

    Returns:
        An AtomicFile or a VerifiedFile. After close() the first has a `report`.

    Raises:
        ValueError: the mode is another one.
        StorageError: the file could not be opened. It is an OSError with errno and path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"open() takes a path, not {type(path).__name__}")
    name = os.fspath(path)
    kind = "".join(sorted(mode))
    if kind == "bw":
        request = SaveRequest.of(durable, replace, deadline=deadline, checksums=checksums)
        return AtomicFile(name, request, expected_bytes=expected_bytes)
    if kind == "br":
        return nearest(name, tier_folder(None), VerifiedFile)
    why = "files are read, or written from the beginning"
    if not set(mode) - set("rwt"):
        why = "files have bytes, and text an encoding that you choose"
    raise ValueError(f'cannot open "{name}" in mode "{mode}": {why}; use "rb" or "wb"')
