# SPDX-License-Identifier: Apache-2.0
"""Tensors of a safetensors file, read into memory of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from ioshape._files.verified import VerifiedFile
from ioshape._native import ffi
from ioshape._safetensors import header
from ioshape._safetensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from ioshape._safetensors.header import Entry


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor of the CPU."""
    n_bytes = tensor.numel() * tensor.element_size()
    return memoryview(ffi.buffer(ffi.cast("char *", tensor.data_ptr()), n_bytes))


def _dtype_of(entry: Entry) -> torch.dtype:
    dtype: torch.dtype | None = getattr(torch, DTYPES[entry.dtype][0], None)
    if dtype is None:
        raise ValueError(
            f"tensor '{entry.name}' has the dtype {entry.dtype}, which this torch has not; use a "
            "newer one"
        )
    return dtype


class File:
    """An open safetensors file."""

    def __init__(self, filename: str | os.PathLike[str], device: Any = "cpu") -> None:
        self.path = os.fspath(filename)
        self._device = torch.device(device)
        self._file = VerifiedFile(self.path)
        try:
            file_bytes = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            self._header = header.read(self._file, file_bytes, self.path)
        except BaseException:
            self._file.close()
            raise
        self.entries = {entry.name: entry for entry in self._header.entries}
        self.metadata = self._header.metadata

    def __enter__(self) -> File:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file. A second call does nothing."""
        self._file.close()

    def _fill(self, tensor: torch.Tensor, offset: int) -> None:
        """From this place in the file."""
        if self._file.tell() != offset:
            self._file.seek(offset)
        view = _memory_of(tensor)
        while view.nbytes:
            count = self._file.readinto(view)
            if not count:
                raise EOFError(f"{self.path} has become shorter while it was read")
            view = view[count:]

    def read(self, entry: Entry) -> torch.Tensor:
        """All of a tensor."""
        tensor = torch.empty(header.shape_in_torch(entry), dtype=_dtype_of(entry), device="cpu")
        self._fill(tensor, entry.begin)
        return tensor.to(self._device)

    def read_rows(self, entry: Entry, first: int, last: int) -> torch.Tensor:
        """Of its first dimension those from `first` to before `last`."""
        shape = header.shape_in_torch(entry)
        row_bytes = (entry.end - entry.begin) // max(shape[0], 1)
        rows = torch.empty((max(last - first, 0), *shape[1:]), dtype=_dtype_of(entry), device="cpu")
        self._fill(rows, entry.begin + first * row_bytes)
        return rows

    def read_into(self, entry: Entry, into: torch.Tensor) -> torch.Tensor:
        """All of a tensor, to where there is one already."""
        if into.dtype != _dtype_of(entry) or tuple(into.shape) != header.shape_in_torch(entry):
            raise ValueError(
                f"tensor '{entry.name}' of {self.path} has dtype {_dtype_of(entry)} and shape "
                f"{header.shape_in_torch(entry)}, and is to be read into one of {into.dtype} and "
                f"{tuple(into.shape)}"
            )
        with torch.no_grad():
            if into.device.type == "cpu" and into.is_contiguous():
                self._fill(into, entry.begin)
                # So that autograd notices, as of anything in place.
                torch.autograd.graph.increment_version(into)
            else:
                into.copy_(self.read(entry))
        return into

    def tensors(
        self, into: Mapping[str, torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All, in the order of the file."""
        given = into or {}
        for entry in self._header.entries:
            if entry.name in given:
                yield entry.name, self.read_into(entry, given[entry.name])
            else:
                yield entry.name, self.read(entry)


class Slice:
    """A tensor of which only a part may be read, as safe_open.get_slice() gives it."""

    def __init__(self, file: File, entry: Entry) -> None:
        self._file = file
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Of all of it."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The format's name of it."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As of a tensor. Only rows that are asked for are read."""
        entry = self._entry
        given = index if isinstance(index, tuple) else (index,)
        rows = given[0] if given and entry.shape else None
        shape = header.shape_in_torch(entry)
        if isinstance(rows, slice):
            first, last, step = rows.indices(shape[0])
            if step < 1:
                raise ValueError("step must be greater than zero")
            part = self._file.read_rows(entry, first, max(first, last))[::step]
        elif isinstance(rows, int):
            first = rows + shape[0] if rows < 0 else rows
            if not 0 <= first < shape[0]:
                raise IndexError(f"index {rows} of tensor '{entry.name}' with {shape[0]} rows")
            part = self._file.read_rows(entry, first, first + 1)
            given = (0, *given[1:])
        else:
            part = self._file.read(entry)
        if isinstance(rows, slice):
            given = (slice(None), *given[1:])
        # What is not wanted of the rows is not kept.
        part = part[given] if given else part
        return part.clone(memory_format=torch.contiguous_format).to(self._file._device)
