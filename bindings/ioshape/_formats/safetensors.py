# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file. It is untrusted, so each part is checked before it is used.

Tensors are parsed one by one. An invalid header is refused at its first wrong member, and costs no
more memory than its text.
"""

from __future__ import annotations

import json
import re
from json import decoder
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ioshape._core.errors import damaged, failure
from ioshape._formats.dtypes import DTYPES
from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Callable

#: The longest header: 256 bytes for each tensor. The original library accepts 100 MB. With one
#: character above U+FFFF in each name, such a header would take four times that memory.
MAX_BYTES = 32 << 20
#: the most tensors in a file; no known model has so many in one file
MAX_TENSORS = 1 << 17
_MAX_DIMS = 64  # IOSHAPE_MAX_DIMS
#: the most dimensions of all tensors together; each takes about 40 bytes of memory
_MAX_ALL_DIMS = 1 << 20
_MAX_NAME_BYTES = 1 << 16
_MAX_METADATA = 1 << 16
_MAX_METADATA_BYTES = 1 << 24
_METADATA = "__metadata__"
_LENGTH_BYTES = 8


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    #: name of the dtype in the format
    dtype: str
    #: Shape in the file. For F4 it counts values, but torch counts bytes of two values.
    shape: tuple[int, ...]
    #: offsets in the file of the first byte and behind the last
    begin: int
    end: int


class Header(NamedTuple):
    """The content of a header."""

    #: tensors in the order of the file
    entries: tuple[Entry, ...]
    #: metadata; None if the file has none, as opposed to an empty dict
    metadata: dict[str, str] | None


def shape_in_torch(entry: Entry) -> tuple[int, ...]:
    """Return the shape as torch has it. For F4 that counts bytes of two values."""
    if DTYPES[entry.dtype][1] >= 8 or not entry.shape:
        return entry.shape
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as all tensors in such files are."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class _Wrong(Exception):
    """A defect of the header. The argument describes it."""


def read(
    read_bytes: Callable[[int, int], bytearray], file_bytes: int, path: str, operation: str
) -> Header:
    """Read the header of an open file.

    Args:
        read_bytes: Returns a range of the file, given its offset and its length.
        file_bytes: The size of the file.
        path: The path, for errors.
        operation: The operation, for errors.

    Raises:
        FormatError: The file is not a safetensors file.
        DamagedError: It is one, but is inconsistent.
        StorageError: The header is longer than MAX_BYTES.
    """
    if file_bytes < _LENGTH_BYTES + 2:
        _refuse(path, operation)
    begin = read_bytes(0, _LENGTH_BYTES + 1)
    length, most = int.from_bytes(begin[:-1], "little"), file_bytes - _LENGTH_BYTES
    # The first bytes of a file in another format can also give a length.
    if length < 2 or begin[-1:] != b"{" or length > max(most, MAX_BYTES):
        _refuse(path, operation)
    if length > most:
        why = "its header extends beyond the end of the file"
        raise damaged(path, why, operation, remedy="use another copy")
    if length > MAX_BYTES:
        raise failure(
            lib.IOSHAPE_E_LIMIT,
            f'the header of "{path}" has {length} bytes, and at most {MAX_BYTES} are supported',
            path,
            operation,
            remedy="load it with the package safetensors",
        )
    # In latin-1 each byte is one character. In UTF-8 a single character of a name could make the
    # whole text four times as large.
    text = str(read_bytes(_LENGTH_BYTES, length), "latin-1")
    try:
        return _parsed(text, most - length, _LENGTH_BYTES + length)
    except _Wrong as wrong:
        raise damaged(path, str(wrong), operation, remedy="use another copy") from None


def _refuse(path: str, operation: str) -> NoReturn:
    raise failure(
        lib.IOSHAPE_E_FORMAT,
        f'"{path}" is not a safetensors file',
        path,
        operation,
        remedy="check the path",
    )


# ---- Parsing ------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\n\r]*")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
#: description of a tensor; 64 lengths take a third of this limit
_TENSOR = re.compile(r"\{[^{}]{0,4096}\}")
_scan: Callable[[str, int], tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _Wrong("its header has a name twice")
    return members


_decode = json.JSONDecoder(object_pairs_hook=_members).decode


def _string(text: str, at: int, most_bytes: int) -> tuple[str, int]:
    """Return the string that begins at an offset, and the offset of its end."""
    if text[at : at + 1] != '"':
        raise ValueError
    value, end = _scan(text, at + 1)
    if end - at > most_bytes:
        raise _Wrong(f"its header has a text of {end - at} bytes")
    if not value.isascii():
        value = _decode(text[at:end].encode("latin-1").decode())
    return value, end


def _walk(text: str, at: int, take: Callable[[str, int], int]) -> int:
    """Parse an object whose opening brace is before `at`, and return the offset of its end.

    `take` gets each name and the offset of its value, and returns the offset of the value's end.
    """
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    if text[at : at + 1] == "}":
        return at + 1
    while True:
        name, at = _string(text, at, _MAX_NAME_BYTES)
        colon = _COLON.match(text, at)
        if colon is None:
            raise ValueError
        following = _NEXT.match(text, take(name, colon.end()))
        if following is None:
            raise ValueError
        at = following.end()
        if following[1] == "}":
            return at


class _Parser:
    def __init__(self, text: str, begin: int) -> None:
        self._text = text
        self._begin = begin
        self._dims = 0
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] | None = None
        self._has_metadata = False

    def parse(self) -> None:
        end = _walk(self._text, 1, self._take)
        if _SPACE.fullmatch(self._text, end) is None:
            raise ValueError

    def _take(self, name: str, at: int) -> int:
        if name == _METADATA:
            return self._take_metadata(at)
        found = _TENSOR.match(self._text, at)
        if found is None:
            raise _Wrong(f"the entry of tensor '{name[:200]}' is incomplete")
        if name in self.entries:
            raise _Wrong("its header has a name twice")
        if len(self.entries) >= MAX_TENSORS:
            raise _Wrong(f"it has more than {MAX_TENSORS:,} tensors")
        entry = self.entries[name] = _entry(name, _decode(found[0]), self._begin)
        self._dims += len(entry.shape)
        if self._dims > _MAX_ALL_DIMS:
            raise _Wrong(f"its tensors have more than {_MAX_ALL_DIMS:,} dimensions")
        return found.end()

    def _take_metadata(self, at: int) -> int:
        if self._has_metadata:
            raise _Wrong("its header has a name twice")
        self._has_metadata = True
        if self._text.startswith("null", at):
            return at + 4
        if self._text[at : at + 1] != "{":
            raise _Wrong("its metadata is not a dict of texts")
        texts = self.metadata = dict[str, str]()
        begin = at

        def take(name: str, at: int) -> int:
            if self._text[at : at + 1] != '"':
                raise _Wrong("its metadata is not a dict of texts")
            if name in texts:
                raise _Wrong("its header has a name twice")
            texts[name], end = _string(self._text, at, _MAX_METADATA_BYTES)
            if len(texts) > _MAX_METADATA or end - begin > _MAX_METADATA_BYTES:
                raise _Wrong("its metadata is too large")
            return end

        return _walk(self._text, at + 1, take)


def _parsed(text: str, data_bytes: int, begin: int) -> Header:
    parser = _Parser(text, begin)
    try:
        parser.parse()
    except (ValueError, RecursionError):
        raise _Wrong("its header is not valid JSON") from None
    entries = sorted(parser.entries.values(), key=lambda entry: (entry.begin, entry.end))
    end = begin
    for entry in entries:
        if entry.begin != end:
            raise _Wrong(f"there is a gap or another tensor before tensor '{entry.name[:200]}'")
        end = entry.end
    if end != begin + data_bytes:
        raise _Wrong("its tensors do not end at the end of the file")
    return Header(tuple(entries), parser.metadata)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, told: dict[str, Any], begin: int) -> Entry:
    shown = name[:200]
    if not {"dtype", "shape", "data_offsets"} <= set(told):
        raise _Wrong(f"the entry of tensor '{shown}' is incomplete")
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_size, shape)):
        raise _Wrong(f"the shape of tensor '{shown}' is not valid")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _Wrong(f"the offsets of tensor '{shown}' are not valid")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Wrong(f"this version of ioshape does not know the dtype of tensor '{shown}'")
    if _bits(shape, DTYPES[dtype][1]) != (offsets[1] - offsets[0]) * 8:
        raise _Wrong(f"tensor '{shown}' does not have the size that its shape needs")
    return Entry(name, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _bits(shape: list[int], bits: int) -> int:
    """Return the size of a tensor in bits. If it exceeds any file, the result may be too small.

    Such a result is still larger than any file.
    """
    if 0 in shape:
        return 0
    for length in shape:
        bits *= length
        if bits >> 67:
            break
    return bits
