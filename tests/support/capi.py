# SPDX-License-Identifier: Apache-2.0
"""The C API through ctypes: enough to save records and torch tensors of any layout."""

import ctypes
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tree import build_folder

DTYPES = {
    torch.uint8: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.complex32: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.bool: 12,
    torch.bfloat16: 13,
    torch.uint16: 14,
    torch.uint32: 15,
    torch.uint64: 16,
    torch.float8_e4m3fn: 17,
    torch.float8_e5m2: 18,
    torch.float8_e4m3fnuz: 19,
    torch.float8_e5m2fnuz: 20,
    torch.float8_e8m0fnu: 21,
    torch.float4_e2m1fn_x2: 22,
}


#: value of IOSHAPE_FORMAT_SAFETENSORS
SAFETENSORS = 1


class CTensor(ctypes.Structure):
    """struct ioshape_tensor."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_int),
        ("dims", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
    ]


FETCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
)


class CRecord(ctypes.Structure):
    """struct ioshape_record."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("alignment", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("fetch", FETCH),
        ("fetch_user", ctypes.c_void_p),
    ]


class CAttribute(ctypes.Structure):
    """struct ioshape_attribute."""

    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


class CMetadata(ctypes.Structure):
    """struct ioshape_metadata."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("step", ctypes.c_int64),
        ("blob", ctypes.c_void_p),
        ("blob_bytes", ctypes.c_size_t),
        ("attributes", ctypes.POINTER(CAttribute)),
        ("attribute_count", ctypes.c_size_t),
    )


class CSaveOptions(ctypes.Structure):
    """struct ioshape_save_options."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("metadata", ctypes.POINTER(CMetadata)),
        ("progress", ctypes.c_void_p),
        ("progress_user", ctypes.c_void_p),
        ("report", ctypes.c_void_p),
        ("replace", ctypes.c_uint32),
        ("sync", ctypes.c_uint32),
        ("borrow", ctypes.c_uint32),
        ("queue", ctypes.c_void_p),
        ("queue_user", ctypes.c_void_p),
        ("deadline_ms", ctypes.c_int64),
        ("checksums", ctypes.c_uint32),
        ("format", ctypes.c_uint32),
    ]


class Way(Enum):
    """The ways in which records are saved."""

    BLOCKING = 0
    BACKGROUND = 1
    BORROWED = 2


class CError(ctypes.Structure):
    """The members of struct ioshape_error that are used here."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("code", ctypes.c_int),
        ("operation", ctypes.c_char_p),
        ("path", ctypes.c_char_p),
        ("sentence", ctypes.c_char_p),
        ("remedy", ctypes.c_char_p),
    )


class SaveError(Exception):
    """The error that ioshape_last_error() returns."""


@cache
def library() -> Any:
    loaded = ctypes.CDLL(str(build_folder() / "libioshape" / "libioshape.so"))
    loaded.ioshape_last_error.restype = ctypes.POINTER(CError)
    return loaded


def last_error() -> SaveError:
    error = library().ioshape_last_error().contents
    return SaveError(f"{error.sentence.decode()}; {error.remedy.decode()}")


@cache
def context() -> ctypes.c_void_p:
    opened = ctypes.c_void_p()
    if library().ioshape_context_open(ctypes.byref(opened), None):
        raise last_error()
    return opened


def numbers(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def c_tensor(name: str, tensor: torch.Tensor) -> CTensor:
    return CTensor(
        name.encode(),
        DTYPES[tensor.dtype],
        tensor.dim(),
        numbers(tuple(tensor.shape)),
        numbers(tensor.stride()),
        tensor.data_ptr() or None,
    )


def c_tensors(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return an array of struct ioshape_tensor, with torch's own strides."""
    return (CTensor * len(tensors))(*(c_tensor(*item) for item in tensors.items()))


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Call ioshape_save_tensors()."""
    _save("tensors", path, c_tensors(tensors), len(tensors), Way.BLOCKING)


def c_metadata(attributes: Mapping[str, str], step: int = 0) -> CMetadata:
    given = (CAttribute * len(attributes))(
        *(CAttribute(name.encode(), value.encode()) for name, value in attributes.items())
    )
    return CMetadata(ctypes.sizeof(CMetadata), step, None, 0, given, len(attributes))


def save_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: CMetadata | None = None,
    way: Way = Way.BLOCKING,
) -> None:
    """Call ioshape_save_tensors() with IOSHAPE_FORMAT_SAFETENSORS."""
    _save("tensors", path, c_tensors(tensors), len(tensors), way, metadata, SAFETENSORS)


def address_of(data: bytes) -> int | None:
    """Return the address of bytes, valid while they are alive."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value if data else None


def c_record(name: str, data: bytes, fetch: bool) -> CRecord:
    if not fetch:
        return CRecord(name.encode(), address_of(data), len(data))

    def bring(_user: int, offset: int, into: int, size: int) -> int:
        ctypes.memmove(into, data[offset : offset + size], size)
        return 0

    return CRecord(name.encode(), None, len(data), 0, 0, FETCH(bring))


def save_records(
    path: Path, records: Sequence[tuple[str, bytes]], way: Way, fetched: bool = False
) -> None:
    """Call ioshape_save_records(); if `fetched`, records below data/ come from functions."""
    given = (CRecord * len(records))(
        *(c_record(name, data, fetched and name.startswith("data/")) for name, data in records)
    )
    _save("records", path, given, len(records), way)


def _save(
    what: str,
    path: Path,
    given: Any,
    count: int,
    way: Way,
    metadata: CMetadata | None = None,
    in_format: int = 0,
) -> None:
    """Call ioshape_save_WHAT()."""
    options = CSaveOptions(
        size=ctypes.sizeof(CSaveOptions), borrow=way is Way.BORROWED, format=in_format
    )
    if metadata is not None:
        options.metadata = ctypes.pointer(metadata)
    save = ctypes.c_void_p()
    code = getattr(library(), f"ioshape_save_{what}")(
        context(),
        str(path).encode(),
        given,
        ctypes.c_size_t(count),
        ctypes.byref(options),
        None if way is Way.BLOCKING else ctypes.byref(save),
    )
    if not code and way is not Way.BLOCKING:
        code = library().ioshape_save_wait(save, ctypes.c_int64(-1))
        library().ioshape_save_free(save)
    if code:
        raise last_error()
