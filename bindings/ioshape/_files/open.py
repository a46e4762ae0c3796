# SPDX-License-Identifier: Apache-2.0
"""ioshape.open()."""

from __future__ import annotations

import os
from typing import Literal, overload

from ioshape._core.config import tier_folder
from ioshape._load.verified import VerifiedFile
from ioshape._save.atomic import AtomicFile
from ioshape._save.request import SaveRequest
from ioshape._tier.drain import nearest


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
    """Open a file of any format, for atomic and durable writing or for verified reading.

    With "wb" the file appears at the path when it is closed: complete, and on stable storage. It
    waits for a slot as other writers do. Use a `with` block: if the block ends with an exception,
    the file is dropped, and the previous file stays. A file that is never closed is dropped as
    well. Many libraries can write to it: torch.save, pickle, numpy, zipfile, safetensors and
    shutil.copyfileobj.

        with ioshape.open("tokens.npy", "wb") as file:
            # Readers see the file when the block ends.
            numpy.save(file, tokens)

    With "rb" sequential reads are prefetched. Reads are verified if checksums are known. That is so
    for files of ioshape.save and torch.save, and for files written with `checksums` that were not
    changed since. If the setting "tier" is set, the copy on the tier is read, unless the file at
    the path is newer.

    Any thread may call this. One thread at a time may use a file. Any number of processes and
    threads may have one path open.

    All arguments but `path` and `mode` are for writing.

    Args:
        path: The path of the file.
        mode: "wb" or "rb". Default: "rb".
        durable: False does not wait for stable storage in close(). Default: the setting "durable".
        replace: False makes close() raise FileExistsError if the path exists. Default: True.
        deadline: Seconds from this call until the process will end, as in save(). Default: none.
        expected_bytes: The size of the file, if it is known. The space is then reserved, so that a
            full disk is noticed at once. An estimate is fine. Default: 0, unknown.
        checksums: True writes a checksum of each MiB into a small file beside it,
            `NAME.ioshape-sums`. They are computed while the file is written. Default: False.

    Returns:
        An AtomicFile for "wb", which has a `report` after close(), or a VerifiedFile for "rb".

    Raises:
        TypeError: `path` is not a path.
        ValueError: `mode` is neither "wb" nor "rb".
        StorageError: The file could not be opened. It is an OSError with errno and path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"open() takes a path, not {type(path).__name__}")
    name = os.fspath(path)
    kind = "".join(sorted(mode))
    if kind == "bw":
        request = SaveRequest.of(name, durable, replace, deadline=deadline, checksums=checksums)
        return AtomicFile(request, expected_bytes=expected_bytes)
    if kind == "br":
        return nearest(name, tier_folder(None), VerifiedFile)
    why = "files can only be read, or written from the beginning"
    if not set(mode) - set("rwt"):
        why = "files hold bytes, and your program encodes text"
    raise ValueError(f'cannot open "{name}" in mode "{mode}": {why}; use "rb" or "wb"')
