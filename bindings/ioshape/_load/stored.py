# SPDX-License-Identifier: Apache-2.0
"""Tensors of an open file, of which slices can be read without reading the rest.

Nothing is unpickled. torch interprets the index: it is applied to a tensor on the device "meta"
with equal shape and strides. The result tells which bytes to read.
"""

from __future__ import annotations

import sys
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from ioshape._core.errors import damaged, failure
from ioshape._core.text import one_line
from ioshape._load.contents import contents_of
from ioshape._load.pickled import item_bytes
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ioshape._load.pickled import Tensor
    from ioshape._load.reader import Reader, Record

# A gap between two ranges is read along with them, unless it is larger than the blocks around them.
_GAP_BYTES = 2 << 20
# the most bytes of ranges with gaps that are in memory at a time
_PIECE_BYTES = 32 << 20


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense tensor on the CPU."""
    n_bytes = tensor.numel() * tensor.element_size()
    return memoryview(ffi.buffer(ffi.cast("char *", tensor.data_ptr()), n_bytes))


class StoredTensor:
    """A tensor of an open file, as ioshape.open(path)[name] returns it.

    Index it like a tensor. The result is a new tensor on the CPU with its own memory. Only the
    selected elements are read, with the blocks around them that have checksums. `tensor[...]` reads
    the whole tensor.

    One thread at a time may use the file and its tensors.
    """

    #: Which reads are verified. "blocks": all reads. "whole": only a read of the whole storage,
    #: such as tensor[...], because files of torch.save have one checksum for each storage. "no":
    #: none.
    verified: Literal["blocks", "whole", "no"]

    def __init__(self, reader: Reader, tensor: Tensor, record: Record | None) -> None:
        self._reader = reader
        self._record = record
        self._dtype = tensor.dtype
        self._stride = tensor.stride
        #: offset in the file of the first element, in bytes
        self._begin = 0 if record is None else record.file_offset + tensor.storage_offset
        #: The path to it in the object that load() returns.
        self.name: str = tensor.name
        #: The shape of the whole tensor.
        self.shape: tuple[int, ...] = tensor.shape
        is_known = reader.has_checksums
        if reader.is_torch_zip:
            is_known = record is not None and record.crc32 != 0
        self.verified = ("blocks" if reader.block_bytes else "whole") if is_known else "no"

    def __repr__(self) -> str:
        return f"<ioshape.types.StoredTensor {self.name!r}: {self._dtype} {self.shape}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"tensor '{one_line(self.name)}' is a scalar, which has no length")
        return self.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor. Raises ValueError if the installed torch does not have it."""
        import torch  # noqa: PLC0415 - not before tensors are made

        dtype = getattr(torch, self._dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"tensor '{one_line(self.name)}' of {self._reader.path} has the dtype "
                f"{self._dtype}, which this version of torch does not have; use a newer one"
            )
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch  # noqa: PLC0415

        each = index if isinstance(index, tuple) else (index,)
        if not all(_is_view(one) for one in each):
            return self[...][index]
        part = self._on_meta()[index]
        # Permute the dimensions so that the result has the order of the file.
        order = sorted(range(part.dim()), key=part.stride().__getitem__, reverse=True)
        part = part.permute(order)
        tensor = torch.empty(part.shape, dtype=part.dtype, device="cpu")
        if tensor.numel():
            self._fill(tensor, part)
        back = [order.index(dim) for dim in range(len(order))]
        return tensor.permute(back).view(self.dtype)

    def _on_meta(self) -> torch.Tensor:
        """Return a tensor on "meta" with the shape and strides of this one.

        Its elements are integers of their size, because torch cannot copy some dtypes.
        """
        import torch  # noqa: PLC0415

        number = getattr(torch, _NUMBERS[torch.empty(0, dtype=self.dtype).element_size()])
        return torch.empty_strided(self.shape, self._stride, dtype=number, device="meta")

    def _fill(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        """Read a tensor. `part` is on "meta": its strides and offset say where the bytes are."""
        item_bytes = part.element_size()
        lengths = list(zip(part.shape, part.stride(), strict=True))
        span = 1 + sum((length - 1) * stride for length, stride in lengths)
        begin = self._begin + int(part.storage_offset()) * item_bytes
        if span == part.numel() and part.is_contiguous() and tensor.is_contiguous():
            self._reader.read_file(begin, memory_of(tensor))
            return
        dim = next(dim for dim, (length, _) in enumerate(lengths) if length > 1)
        length, stride = lengths[dim]
        gap = length * stride - span
        if span * item_bytes > _PIECE_BYTES or gap * item_bytes >= _GAP_BYTES:
            for first, count in ((0, length // 2), (length // 2, length - length // 2)):
                self._fill(tensor.narrow(dim, first, count), part.narrow(dim, first, count))
            return
        between = tensor.new_empty(span)
        self._reader.read_file(begin, memory_of(between))
        tensor.copy_(between.as_strided(part.shape, part.stride()))


#: integer dtypes by size in bytes; complex128 stands in for 16 bytes, and is copied bit by bit
_NUMBERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _is_view(index: object) -> bool:
    """Return whether an index selects elements without looking at the data."""
    if index is None or index is Ellipsis or isinstance(index, slice):
        return True
    return isinstance(index, Integral) and not isinstance(index, bool)


# ---- The tensors of a file ----------------------------------------------------------------------


def stored_tensors(reader: Reader) -> dict[str, StoredTensor | str]:
    """Return the tensors of a file by name, in its order.

    The value is a str if only load() can read the tensor: the reason, as the end of a sentence.

    Raises:
        FormatError: The file contains no tensors.
        DamagedError: The structure of the file is inconsistent.
    """
    contents = contents_of(reader)
    if contents.problem:
        raise failure(
            lib.IOSHAPE_E_DAMAGED,
            f'cannot find the tensors of "{reader.path}": {contents.problem}',
            reader.path,
            "load",
            remedy="use another copy or an older checkpoint",
        )
    records = {record.name: record for record in contents.records}
    is_swapped = byteorder(reader, records) != sys.byteorder
    found: dict[str, StoredTensor | str] = {}
    for tensor in contents.tensors:
        if tensor.name in found:
            found[tensor.name] = "has the name of another tensor"
        elif is_swapped:
            found[tensor.name] = "was saved on a machine with another byte order"
        elif not tensor.is_plain:
            found[tensor.name] = "is not a plain tensor"
        else:
            found[tensor.name] = in_record(reader, tensor, records.get(tensor.record))
    return found


def byteorder(reader: Reader, records: Mapping[str, Record]) -> str:
    """Return the byte order of a file. Old files without that record are little-endian."""
    record = records.get("byteorder")
    if record is None or not 0 < record.n_bytes < len(b"little") + 1:
        return "little"
    return reader.read_bytes(record.file_offset, record.n_bytes).decode(errors="replace")


def in_record(reader: Reader, tensor: Tensor, record: Record | None) -> StoredTensor | str:
    """Return a tensor in a record, or the reason why only load() can read it."""
    each = item_bytes(tensor.dtype)
    if each is None:
        return f"has the dtype {tensor.dtype}, which this version of ioshape does not know"
    lengths = zip(tensor.shape, tensor.stride, strict=True)
    span = 1 + sum((length - 1) * stride for length, stride in lengths)
    n_bytes = 0 if 0 in tensor.shape else tensor.storage_offset + span * each
    if n_bytes > (0 if record is None else record.n_bytes):
        why = f"tensor '{tensor.name}' extends beyond its record"
        raise damaged(reader.path, why, "load")
    return StoredTensor(reader, tensor, record)
