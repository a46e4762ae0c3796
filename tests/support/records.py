# SPDX-License-Identifier: Apache-2.0
"""Where the records of a file lie, and how to harm them."""

import zipfile
from pathlib import Path
from typing import Any

import torch

_FileReader: Any = torch._C.PyTorchFileReader


def offset_of(path: Path, record: str) -> int:
    """Where the data of a record begin, as torch sees it."""
    return int(_FileReader(str(path)).get_record_offset(record))


def content_of(path: Path, record: str) -> bytes:
    """The data of a record, as torch reads them."""
    return bytes(_FileReader(str(path)).get_record(record))


def is_ours(path: Path) -> bool:
    """Whether the library wrote this file, not torch. It is sound in any case."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return any(name.endswith("/.ioshape/index") for name in archive.namelist())


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Turns one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def names_in(folder: Path) -> list[str]:
    """What lies in a folder: nothing, if whoever failed has cleaned up."""
    return sorted(path.name for path in folder.iterdir())
