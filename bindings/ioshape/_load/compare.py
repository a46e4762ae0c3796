# SPDX-License-Identifier: Apache-2.0
"""Compare the tensors of two open files.

Where checksums decide, no data is read. Otherwise data is read in pieces, so that memory is
bounded. torch is imported only for tensors with gaps or different strides.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ioshape._core.errors import failure
from ioshape._formats.dtypes import number_of
from ioshape._load.contents import contents_of
from ioshape._load.pickled import is_dense, item_bytes
from ioshape._load.reader import Record
from ioshape._load.stored import byteorder, in_record, memory_of
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

    from ioshape._load.pickled import Tensor
    from ioshape._load.reader import Reader

# A piece stays in the processor's cache between its read and its comparison.
_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
# The norms in files have about six digits, so only a larger share of a norm is a difference.
_NORM_ERROR = 2e-6
_NO_RECORD = (0, Record("", 0, 0, 0))


@dataclass(frozen=True)
class Difference:
    """The result of the comparison of a tensor."""

    #: The path to it in the loaded object.
    name: str
    state: Literal["equal", "changed", "dtype", "shape", "only in A", "only in B"]
    #: The dtype and the shape in each file; None where the tensor is missing.
    a: tuple[str, tuple[int, ...]] | None = None
    b: tuple[str, tuple[int, ...]] | None = None
    #: The share of the 1 MiB blocks that differ; of the elements, if they were compared. None if
    #: only checksums of whole records were compared.
    changed: float | None = None
    #: The norm of the difference divided by the norm in A; None if it was not computed.
    relative: float | None = None
    #: a number that `relative` cannot be below, from the norms that both saves took; None if there
    #: are none, or if they do not differ
    relative_at_least: float | None = None


class _Range(NamedTuple):
    """The bytes of a tensor in its record."""

    number: int  # position of the record in the file
    record: Record
    begin: int
    n_bytes: int


class _Side:
    """One of the two files, and its tensors by name."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._buffer = bytearray()
        contents = contents_of(reader)
        self.records = {one.name: (index, one) for index, one in enumerate(contents.records)}
        self.tensors = {tensor.name: tensor for tensor in contents.tensors}
        #: position in the file of each tensor of a safetensors file
        self._positions: dict[str, int] = {}
        if not reader.is_torch_zip:
            self._positions = {name: i for i, name in enumerate(self.tensors)}
        problem = contents.problem
        orders = {name: record for name, (_index, record) in self.records.items()}
        if not problem and byteorder(reader, orders) != sys.byteorder:
            problem = "it was saved on a machine with another byte order"
        if problem:
            sentence = f'cannot compare "{reader.path}": {problem}'
            raise failure(lib.IOSHAPE_E_FORMAT, sentence, reader.path, "load")

    def range_of(self, tensor: Tensor) -> _Range | None:
        """Return the bytes of a tensor; None if there are gaps between its elements.

        The bytes of a tensor that shares elements, or whose elements are not plain, are the whole
        record.
        """
        number, record = self.records.get(tensor.record, _NO_RECORD)
        each = item_bytes(tensor.dtype)
        if not tensor.is_plain or each is None:
            return _Range(number, record, 0, record.n_bytes)
        self.stored(tensor)  # raises an error if the tensor extends beyond its record
        n_bytes = math.prod(tensor.shape) * each
        if n_bytes > record.n_bytes:
            return _Range(number, record, 0, record.n_bytes)
        if n_bytes and not is_dense(tensor.shape, tensor.stride):
            return None
        begin = tensor.storage_offset
        if not self.reader.is_torch_zip:  # checksums beside a file are those of the whole file
            begin += record.file_offset
            record = Record("", self.reader.file_bytes, 0, 0)
        return _Range(number, record, begin, n_bytes)

    def norm_of(self, tensor: Tensor, bytes_: _Range) -> float | None:
        """Return a tensor's norm if the save took it, and if all its elements are finite."""
        position = self._positions.get(tensor.name, bytes_.number)
        is_whole = self._positions or bytes_.n_bytes == bytes_.record.n_bytes
        found = self.reader.statistics(position) if is_whole else None
        if found is None or found.dtype != number_of(tensor.dtype):
            return None
        return None if found.nans or found.infinities else math.sqrt(found.sum_squares)

    def stored(self, tensor: Tensor) -> Any:
        """Return a plain tensor, so that slices of it can be read."""
        return in_record(self.reader, tensor, self.records.get(tensor.record, _NO_RECORD)[1])

    def read(self, bytes_: _Range, piece: tuple[int, int]) -> bytearray:
        """Return a piece of a range, in memory that the next call uses again."""
        offset, n_bytes = piece
        if len(self._buffer) != n_bytes:
            self._buffer = bytearray(n_bytes)
        at = bytes_.record.file_offset + bytes_.begin + offset
        self.reader.read_file(at, memoryview(self._buffer))
        return self._buffer


# ---- Checksums -----------------------------------------------------------------------------------


class _Blocks:
    """The blocks of a tensor that differ, and those that must be read to decide."""

    def __init__(self, a: _Side, at_a: _Range, b: _Side, at_b: _Range) -> None:
        self.total = -(-at_a.n_bytes // _BLOCK_BYTES)
        #: the number of blocks that differ; None if checksums say only that the tensors differ
        self.changed: int | None = 0
        #: the ranges of the tensor on which checksums do not decide
        self.open: list[tuple[int, int]] = []
        size = a.reader.block_bytes
        sums_a = a.reader.block_checksums(at_a.number)
        sums_b = b.reader.block_checksums(at_b.number)
        if sums_a and sums_b and size == b.reader.block_bytes and at_a.begin == at_b.begin:
            self._compare(at_a, at_b.record.n_bytes, size, sums_a, sums_b)
        elif all(at.n_bytes == at.record.n_bytes and at.record.crc32 for at in (at_a, at_b)):
            if at_a.record.crc32 != at_b.record.crc32:
                self.changed = None
        else:
            self.open = [(0, at_a.n_bytes)]

    def _compare(
        self, at: _Range, other_bytes: int, size: int, sums_a: list[int], sums_b: list[int]
    ) -> None:
        end = at.begin + at.n_bytes
        blocks = range(at.begin // size, -(-end // size))
        self.total, changed = len(blocks), 0
        for block in blocks:
            first, last = block * size, min((block + 1) * size, at.record.n_bytes)
            is_comparable = last == min((block + 1) * size, other_bytes)
            if is_comparable and sums_a[block] == sums_b[block]:
                continue
            if is_comparable and at.begin <= first and last <= end:
                changed += 1
            else:  # the block holds bytes of other tensors
                self.open.append((max(first, at.begin) - at.begin, min(last, end) - at.begin))
        self.changed = changed


# ---- Elements ------------------------------------------------------------------------------------


class _Meter:
    """Sums over the elements of a tensor in both files."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype = number_of(tensor.dtype) if tensor.is_plain else 0
        self._has_norm = False
        self._sum = ffi.new("struct base_difference *")

    def add(self, a: bytearray | memoryview, b: bytearray | memoryview) -> None:
        """Add equally long pieces of both files."""
        memory = ffi.from_buffer(a), ffi.from_buffer(b)
        self._has_norm = lib.base_difference_add(self._sum, self._dtype, *memory, len(a))

    def result(self, found: Difference) -> Difference:
        """Return the result, if an element differs."""
        told, relative = self._sum, None
        if not told.changed:
            return found
        if self._has_norm:
            relative = (
                math.sqrt(told.squares / told.squares_of_a) if told.squares_of_a else math.inf
            )
        share = told.changed / told.count
        return replace(found, state="changed", changed=share, relative=relative)


def _slices(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices that divide a tensor into slices of at most `most` elements."""
    inner = 1
    for dim in reversed(range(len(shape))):
        if inner * shape[dim] > most:
            step = max(1, most // inner)
            for outer in _slices(shape[:dim], 1):
                for first in range(0, shape[dim], step):
                    yield (*outer, slice(first, first + step))
            return
        inner *= shape[dim]
    yield ()


def _least_difference(a: float | None, b: float | None) -> float | None:
    """Return a bound for the norm of the difference, divided by the norm in A.

    It is at least the difference of the norms, by the triangle inequality.
    """
    if a is None or b is None:
        return None
    least = abs(a - b) - _NORM_ERROR * (a + b)
    if not least > 0:
        return None
    return least / a if a else math.inf


# ---- Files ---------------------------------------------------------------------------------------


def _pieces(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    return ((offset, min(step, end - offset)) for offset in range(begin, end, step))


class Comparison:
    """The comparison of two open files. One thread at a time may use it."""

    def __init__(self, a: Reader, b: Reader, *, exact: bool, executor: Executor) -> None:
        self._a, self._b = _Side(a), _Side(b)
        self._exact = exact
        self._executor = executor  # reads one file while this thread reads the other
        self._known: dict[object, Difference] = {}

    def has_equal_values(self) -> bool:
        """Return whether the pickles are equal: names, order, and values other than tensors."""
        a, b = (side.records.get("data.pkl", _NO_RECORD)[1] for side in (self._a, self._b))
        return (a.n_bytes, a.crc32) == (b.n_bytes, b.crc32)

    def differences(self) -> Iterator[Difference]:
        """Yield the result for each tensor of either file."""
        for name, a in self._a.tensors.items():
            b = self._b.tensors.get(name)
            if b is None:
                yield Difference(name, "only in A", (a.dtype, a.shape))
                continue
            found = Difference(name, "equal", (a.dtype, a.shape), (b.dtype, b.shape), 0.0)
            if a.shape != b.shape:
                yield replace(found, state="shape", changed=None)
            elif a.dtype != b.dtype or a.is_plain != b.is_plain:
                yield replace(found, state="dtype", changed=None)
            else:
                # Names of one tensor, such as tied weights, are compared once.
                key = replace(a, name=""), replace(b, name="")
                if key not in self._known:
                    self._known[key] = self._compare(found, a, b)
                yield replace(self._known[key], name=name)
        for name, b in self._b.tensors.items():
            if name not in self._a.tensors:
                yield Difference(name, "only in B", None, (b.dtype, b.shape))

    def _compare(self, found: Difference, a: Tensor, b: Tensor) -> Difference:
        at_a, at_b = self._a.range_of(a), self._b.range_of(b)
        if at_a is None or at_b is None or a.stride != b.stride:
            return self._compare_slices(found, a, b)
        if at_a.n_bytes != at_b.n_bytes:
            return replace(found, state="changed", changed=None)
        if not at_a.n_bytes:
            return found
        if self._exact:
            return self._compare_elements(found, a, at_a, at_b)
        found = self._compare_blocks(found, at_a, at_b)
        if found.state == "equal":
            return found
        norms = self._a.norm_of(a, at_a), self._b.norm_of(b, at_b)
        return replace(found, relative_at_least=_least_difference(*norms))

    def _read(
        self, at_a: _Range, at_b: _Range, piece: tuple[int, int]
    ) -> tuple[bytearray, bytearray]:
        reading = self._executor.submit(self._a.read, at_a, piece)
        try:
            y = self._b.read(at_b, piece)
        finally:
            x = reading.result()
        return x, y

    def _compare_blocks(self, found: Difference, at_a: _Range, at_b: _Range) -> Difference:
        blocks = _Blocks(self._a, at_a, self._b, at_b)
        if blocks.changed is None:
            return replace(found, state="changed", changed=None)
        for begin, end in blocks.open:
            for piece in _pieces(begin, end, _PIECE_BYTES):
                x, y = self._read(at_a, at_b, piece)
                if x != y:
                    parts = _pieces(0, len(x), _BLOCK_BYTES)
                    blocks.changed += sum(x[i : i + n] != y[i : i + n] for i, n in parts)
        if not blocks.changed:
            return found
        return replace(found, state="changed", changed=blocks.changed / blocks.total)

    def _compare_elements(
        self, found: Difference, tensor: Tensor, at_a: _Range, at_b: _Range
    ) -> Difference:
        meter: _Meter | None = None
        equal = []
        for piece in _pieces(0, at_a.n_bytes, _PIECE_BYTES):
            x, y = self._read(at_a, at_b, piece)
            if x == y:
                equal.append(piece)
            else:
                meter = meter or _Meter(tensor)
                meter.add(x, y)
        if meter is None:
            return found
        for piece in equal:  # the norm of the tensor counts them, too
            x = self._a.read(at_a, piece)
            meter.add(x, x)
        return meter.result(found)

    def _compare_slices(self, found: Difference, a: Tensor, b: Tensor) -> Difference:
        stored = self._a.stored(a), self._b.stored(b)
        meter = _Meter(a)
        for index in _slices(a.shape, _PIECE_BYTES // 16):
            x, y = (one[index].contiguous() for one in stored)
            meter.add(memory_of(x), memory_of(y))
        return meter.result(found)
