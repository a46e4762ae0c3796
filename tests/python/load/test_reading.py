# SPDX-License-Identifier: Apache-2.0
"""ioshape_reader_*() with files that other programs wrote or changed."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENODATA
from pathlib import Path
from typing import Any

import pytest
import torch
from capi import context, last_error, save
from ioshape._core.structs import sized
from ioshape._native import ffi, lib


class Reader:
    def __init__(self, path: Path) -> None:
        out = ffi.new("struct ioshape_reader **")
        if lib.ioshape_reader_open(context(), str(path).encode(), ffi.NULL, out):
            raise last_error()
        self.handle = out[0]

    def message(self) -> str:
        return str(last_error())

    def read(self, name: str, size: int) -> bytes:
        """Return the first bytes of a record."""
        index, memory = ffi.new("uint64_t *"), ffi.new("char[]", size)
        code = lib.ioshape_reader_find_record(self.handle, name.encode(), index)
        if not code:
            code = lib.ioshape_reader_read(self.handle, index[0], 0, memory, size)
        assert code == 0, self.message()
        return bytes(ffi.buffer(memory))

    def verify(self) -> int:
        return int(lib.ioshape_reader_verify(self.handle, 1))

    def why_no_tensors(self) -> str:
        request = ffi.new("struct ioshape_load_request *")
        code = lib.ioshape_reader_load(self.handle, request, 0)
        assert code == lib.IOSHAPE_E_NO_TABLE
        return self.message()

    def info(self) -> Any:
        info = sized("ioshape_reader_info")
        assert lib.ioshape_reader_get_info(self.handle, info) == 0
        return info


@contextmanager
def reading(path: Path) -> Iterator[Reader]:
    reader = Reader(path)
    try:
        yield reader
    finally:
        lib.ioshape_reader_free(reader.handle)


@pytest.fixture
def no_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


WEIGHT = torch.arange(1000000.0)
WEIGHT_BYTES = WEIGHT.numpy().tobytes()


@pytest.mark.usefixtures("no_checksums")
def test_files_without_checksums_are_read_but_not_verified(tmp_path: Path) -> None:
    path = tmp_path / "unchecked.pt"
    torch.save({"weight": WEIGHT}, path)
    with reading(path) as reader:
        assert reader.read("data/0", len(WEIGHT_BYTES)) == WEIGHT_BYTES
        assert reader.verify() == -ENODATA
        assert "written without checksums" in reader.message()
        assert str(path) in reader.message()


def test_files_with_checksums_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "checked.pt"
    torch.save({"weight": WEIGHT}, path)
    with reading(path) as reader:
        assert reader.read("data/0", len(WEIGHT_BYTES)) == WEIGHT_BYTES
        assert reader.verify() == 0
        assert not reader.info().has_table


def test_repacked_files_say_why_they_have_no_tensors(tmp_path: Path) -> None:
    original, path = tmp_path / "original.pt", tmp_path / "repacked.pt"
    save(original, {"weight": WEIGHT})
    with reading(original) as reader:
        assert reader.info().tensors == 1
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with reading(path) as reader:
        assert not reader.info().has_table
        assert str(path) in reader.why_no_tensors()
        assert reader.read("data/0", len(WEIGHT_BYTES)) == WEIGHT_BYTES
        assert reader.verify() == 0
