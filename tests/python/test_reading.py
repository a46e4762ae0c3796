# SPDX-License-Identifier: Apache-2.0
"""What ioshape_reader_*() answers about files that something else wrote or changed."""

import ctypes
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENODATA
from pathlib import Path

import pytest
import torch
from capi import SaveError, context, library, save

NO_TABLE = -5004


class Reader:
    def __init__(self, path: Path) -> None:
        self.handle = ctypes.c_void_p()
        code = library().ioshape_reader_open(
            context(), str(path).encode(), None, ctypes.byref(self.handle)
        )
        if code:
            raise SaveError(library().ioshape_context_message(context()).decode())

    def message(self) -> str:
        library().ioshape_reader_message.restype = ctypes.c_char_p
        return str(library().ioshape_reader_message(self.handle).decode())

    def read(self, name: str, size: int) -> bytes:
        """The first bytes of a record."""
        index, memory = ctypes.c_uint64(), ctypes.create_string_buffer(size)
        code = library().ioshape_reader_find_record(self.handle, name.encode(), ctypes.byref(index))
        if not code:
            code = library().ioshape_reader_read(
                self.handle, index, ctypes.c_uint64(0), memory, ctypes.c_size_t(size)
            )
        assert code == 0, self.message()
        return memory.raw

    def verify(self) -> int:
        return int(library().ioshape_reader_verify(self.handle))

    def count_tensors(self) -> int:
        """A code if that fails."""
        count = ctypes.c_uint64()
        code = library().ioshape_reader_tensors(self.handle, ctypes.byref(count))
        return int(code or count.value)


@contextmanager
def reading(path: Path) -> Iterator[Reader]:
    reader = Reader(path)
    try:
        yield reader
    finally:
        library().ioshape_reader_free(reader.handle)


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
        assert reader.count_tensors() == NO_TABLE
        assert "was not saved by ioshape_save_tensors()" in reader.message()


def test_repacked_files_say_why_they_have_no_tensors(tmp_path: Path) -> None:
    original, path = tmp_path / "original.pt", tmp_path / "repacked.pt"
    save(original, {"weight": WEIGHT})
    with reading(original) as reader:
        assert reader.count_tensors() == 1
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with reading(path) as reader:
        assert reader.count_tensors() == NO_TABLE
        assert f"the index of {path} cannot be used" in reader.message()
        assert reader.read("data/0", len(WEIGHT_BYTES)) == WEIGHT_BYTES
        assert reader.verify() == 0
