# SPDX-License-Identifier: Apache-2.0
"""The C API as the bindings declare it: enough to save records and torch tensors of any layout."""

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ioshape._core.structs import said, sized
from ioshape._native import ffi, lib

#: Numbers of the types in enum ioshape_dtype, in their order.
DTYPES = {
    getattr(torch, name.removeprefix("IOSHAPE_").lower()): number
    for name, number in sorted(
        ffi.typeof("enum ioshape_dtype").relements.items(), key=lambda item: item[1]
    )
}


class Way(Enum):
    """The ways in which records are saved."""

    BLOCKING = 0
    BACKGROUND = 1
    BORROWED = 2


class SaveError(Exception):
    """The error that ioshape_last_error() returns."""


def last_error() -> SaveError:
    error = lib.ioshape_last_error()
    return SaveError(f"{said(error.sentence)}; {said(error.remedy)}")


@cache
def context() -> Any:
    opened = ffi.new("struct ioshape_context **")
    if lib.ioshape_context_open(opened, ffi.NULL):
        raise last_error()
    return opened[0]


class Given:
    """Arguments of a call, which keeps all memory that they refer to."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def new(self, *arguments: Any) -> Any:
        made = ffi.new(*arguments)
        self._kept.append(made)
        return made

    def text(self, text: str) -> Any:
        return self.new("char[]", text.encode())

    def tensors(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return an array of struct ioshape_tensor, with torch's own strides."""
        rows = [
            {
                "name": self.text(name),
                "dtype": DTYPES[tensor.dtype],
                "dims": tensor.dim(),
                "shape": self.new("int64_t[]", list(tensor.shape)),
                "strides": self.new("int64_t[]", list(tensor.stride())),
                "data": ffi.cast("void *", tensor.data_ptr()),
            }
            for name, tensor in tensors.items()
        ]
        return self.new("struct ioshape_tensor[]", rows)

    def metadata(self, attributes: Mapping[str, str], step: int) -> Any:
        made = sized("ioshape_metadata")
        rows = [{"name": self.text(n), "value": self.text(v)} for n, v in attributes.items()]
        made.step = step
        made.attributes = self.new("struct ioshape_attribute[]", rows)
        made.attribute_count = len(rows)
        self._kept.append(made)
        return made

    def record(self, name: str, data: bytes, *, fetch: bool) -> dict[str, Any]:
        row = {"name": self.text(name), "bytes": len(data)}
        if not fetch:
            return row | {"data": self.new("char[]", data) if data else ffi.NULL}

        @ffi.callback("ioshape_fetch_fn")  # type: ignore[untyped-decorator]
        def bring(_user: Any, offset: int, into: Any, size: int) -> int:
            ffi.memmove(into, data[offset : offset + size], size)
            return 0

        self._kept.append(bring)
        return row | {"fetch": bring}


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Call ioshape_save_tensors()."""
    given = Given()
    options = sized("ioshape_save_options")
    _save(lib.ioshape_save_tensors, path, given.tensors(tensors), len(tensors), options)


def save_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    way: Way = Way.BLOCKING,
    step: int = 0,
) -> None:
    """Call ioshape_save_tensors() with IOSHAPE_FORMAT_SAFETENSORS."""
    given = Given()
    options = sized("ioshape_save_options")
    options.format = lib.IOSHAPE_FORMAT_SAFETENSORS
    if metadata is not None:
        options.metadata = given.metadata(metadata, step)
    _save(lib.ioshape_save_tensors, path, given.tensors(tensors), len(tensors), options, way)


def save_records(
    path: Path, records: Sequence[tuple[str, bytes]], way: Way, fetched: bool = False
) -> None:
    """Call ioshape_save_records(); if `fetched`, records below data/ come from functions."""
    given = Given()
    rows = [
        given.record(name, data, fetch=fetched and name.startswith("data/"))
        for name, data in records
    ]
    made = given.new("struct ioshape_record[]", rows)
    _save(lib.ioshape_save_records, path, made, len(rows), sized("ioshape_save_options"), way)


def _save(
    call: Any, path: Path, given: Any, count: int, options: Any, way: Way = Way.BLOCKING
) -> None:
    options.borrow = way is Way.BORROWED
    out = ffi.NULL if way is Way.BLOCKING else ffi.new("struct ioshape_save **")
    code = call(context(), str(path).encode(), given, count, options, out)
    if not code and way is not Way.BLOCKING:
        code = lib.ioshape_save_wait(out[0], -1)
        lib.ioshape_save_free(out[0])
    if code:
        raise last_error()
