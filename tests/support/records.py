# SPDX-License-Identifier: Apache-2.0
"""Offsets and contents of a file's records, and ways to damage them."""

import zipfile
from pathlib import Path
from typing import Any

import torch

_FileReader: Any = torch._C.PyTorchFileReader


def offset_of(path: Path, record: str) -> int:
    """Return the offset of a record's data, as torch sees it."""
    return int(_FileReader(str(path)).get_record_offset(record))


def content_of(path: Path, record: str) -> bytes:
    """Return a record's data, as torch reads them."""
    return bytes(_FileReader(str(path)).get_record(record))


def is_ours(path: Path) -> bool:
    """Return whether the library wrote this file, and not torch. Fail if the file is damaged."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return any(name.endswith("/.ioshape/index") for name in archive.namelist())


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder. A failed save must have left none."""
    return sorted(path.name for path in folder.iterdir())
