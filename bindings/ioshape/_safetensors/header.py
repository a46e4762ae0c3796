# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file. It is untrusted: nothing of it counts before it is checked."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

from ioshape._errors import failure
from ioshape._native import lib
from ioshape._safetensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The original reads no longer one.
MAX_BYTES = 100_000_000
_METADATA = "__metadata__"
_LENGTH_BYTES = 8


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    #: the format's name of it
    dtype: str
    #: as the file has it: of F4 it counts values, where torch counts bytes of two
    shape: tuple[int, ...]
    #: where in the file the bytes are
    begin: int
    end: int


class Header(NamedTuple):
    """What the file says of itself."""

    #: in the order of the file
    entries: tuple[Entry, ...]
    #: None if it has none, which is not the same as an empty one
    metadata: dict[str, str] | None


def shape_in_torch(entry: Entry) -> tuple[int, ...]:
    """Of F4 it counts bytes of two."""
    if DTYPES[entry.dtype][1] >= 8 or not entry.shape:
        return entry.shape
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of tensors in such files."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def made(tensors: list[Entry], metadata: dict[str, str]) -> tuple[bytes, tuple[Entry, ...]]:
    """The beginning of a file of these tensors, wherever they begin and end, and where they lie
    then."""
    places = list(DTYPES)  # from the end of the file
    offset, placed = 0, []
    members: dict[str, Any] = {_METADATA: metadata}
    for one in sorted(tensors, key=lambda one: (-places.index(one.dtype), one.name.encode())):
        begin, offset = offset, offset + one.end - one.begin
        members[one.name] = {
            "dtype": one.dtype,
            "shape": one.shape,
            "data_offsets": [begin, offset],
        }
        placed.append(one._replace(begin=begin, end=offset))
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > MAX_BYTES:
        raise ValueError(f"the names and shapes take {len(text)} bytes: save fewer in one file")
    first = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, tuple(
        one._replace(begin=one.begin + first, end=one.end + first) for one in placed
    )


class _Wrong(Exception):
    """The argument says what."""


def read(file: IO[bytes], file_bytes: int, path: str, operation: str = "load") -> Header:
    """Reads it from an open file that stands at its beginning.

    Raises:
        FormatError: the file is no safetensors file.
        DamagedError: it is one, and does not fit together.
    """
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if file_bytes < _LENGTH_BYTES + 2 or not 2 <= length <= MAX_BYTES:
        _refuse(path, operation)
    if length > file_bytes - _LENGTH_BYTES:
        # As what another format may begin with.
        if file.read(1) != b"{":
            _refuse(path, operation)
        raise _damaged("its header goes beyond its end", path, operation)
    text = file.read(length)
    if text[:1] != b"{":
        _refuse(path, operation)
    try:
        return _parsed(text, file_bytes - _LENGTH_BYTES - length, _LENGTH_BYTES + length)
    except _Wrong as wrong:
        raise _damaged(str(wrong), path, operation) from None


def _refuse(path: str, operation: str) -> NoReturn:
    raise failure(
        lib.IOSHAPE_E_FORMAT,
        f'"{path}" is not a safetensors file',
        path,
        operation,
        remedy="look at the path",
    )


def _damaged(what: str, path: str, operation: str) -> Exception:
    return failure(
        lib.IOSHAPE_E_DAMAGED,
        f'"{path}" is damaged: {what}',
        path,
        operation,
        remedy="use another copy",
    )


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _Wrong("its header has a name twice")
    return members


def _parsed(text: bytes, data_bytes: int, begin: int) -> Header:
    try:
        members = json.loads(text.decode(), object_pairs_hook=_members)
    except (ValueError, RecursionError):
        raise _Wrong("its header is no JSON") from None
    metadata = members.pop(_METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise _Wrong("its metadata is no dict of texts")
    entries = sorted(_entries(members, begin), key=lambda entry: (entry.begin, entry.end))
    end = begin
    for entry in entries:
        if entry.begin != end:
            raise _Wrong(f"before tensor '{entry.name}' there is a gap, or another tensor")
        end = entry.end
    if end != begin + data_bytes:
        raise _Wrong("its tensors do not end where it ends")
    return Header(tuple(entries), metadata)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entries(members: dict[str, Any], begin: int) -> Iterator[Entry]:
    for name, value in members.items():
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
            raise _Wrong(f"of tensor '{name}' not all is told")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(shape, list) or not all(map(_is_size, shape)):
            raise _Wrong(f"the shape of tensor '{name}' is none")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
            raise _Wrong(f"the offsets of tensor '{name}' are none")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise _Wrong(f"the dtype of tensor '{name}' is none that is known here")
        if _bits(shape, DTYPES[dtype][1]) != (offsets[1] - offsets[0]) * 8:
            raise _Wrong(f"tensor '{name}' has not the bytes that its shape asks for")
        yield Entry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _bits(shape: list[int], bits: int) -> int:
    """Above the largest file: something that is larger, too."""
    if 0 in shape:
        return 0
    for length in shape:
        bits *= length
        if bits >> 67:
            break
    return bits
