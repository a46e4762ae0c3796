# SPDX-License-Identifier: Apache-2.0
"""Tensors of an open file, of which parts can be read, with the blocks that these lie in.

Nothing is unpickled. What an index means is torch's affair: a tensor without memory, of the same
shape and strides, is indexed, and tells which bytes the result has.
"""

from __future__ import annotations

import sys
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from ioshape._core.errors import failure
from ioshape._core.text import one_line
from ioshape._formats import safetensors as header
from ioshape._formats.dtypes import DTYPES
from ioshape._load.contents import is_safetensors, tensors_of
from ioshape._load.pickled import item_bytes
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    import torch

    from ioshape._formats.safetensors import Entry
    from ioshape._load.pickled import Tensor
    from ioshape._load.reader import RawRecord, Reader
    from ioshape._load.verified import VerifiedFile

# What lies between two parts is read over, unless it is more than the blocks around them.
_GAP_BYTES = 2 << 20
# At most so much of what lies between is in memory at a time.
_PIECE_BYTES = 32 << 20


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Of a dense tensor of the CPU."""
    n_bytes = tensor.numel() * tensor.element_size()
    return memoryview(ffi.buffer(ffi.cast("char *", tensor.data_ptr()), n_bytes))


class StoredTensor:
    """A tensor of an open file, as ioshape.open(path)[name] gives it.

    Index it as a tensor: what comes is a tensor with memory of its own, on the CPU. Only what is
    asked for is read, and the blocks around it that have checksums. `tensor[...]` reads all of it.
    For one thread at a time.
    """

    #: "blocks": what is read is verified, whatever part it is. "whole": only where the whole
    #: storage is read, as by tensor[...]; files of torch.save have one checksum for each. "no"
    verified: Literal["blocks", "whole", "no"]

    def __init__(
        self,
        reader: Reader,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        begin: int,
        verified: Literal["blocks", "whole", "no"],
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._stride = stride
        self._begin = begin  # of its first element in the file
        self.verified = verified
        #: how to get to it in what load() returns
        self.name = name
        #: of all of it
        self.shape = shape

    def __repr__(self) -> str:
        return f"<ioshape.types.StoredTensor {self.name!r}: {self._dtype} {self.shape}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"tensor '{one_line(self.name)}' is a scalar, which has no length")
        return self.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """As of a tensor."""
        import torch  # noqa: PLC0415 - not before tensors are made

        dtype = getattr(torch, self._dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"tensor '{one_line(self.name)}' of {self._reader.path} has the dtype "
                f"{self._dtype}, which this torch has not; use a newer one"
            )
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        import torch  # noqa: PLC0415

        each = index if isinstance(index, tuple) else (index,)
        if not all(_is_view(one) for one in each):
            return self[...][index]
        # Bytes are moved as whole numbers: of some dtypes torch cannot copy any.
        number = getattr(torch, _NUMBERS[torch.empty(0, dtype=self.dtype).element_size()])
        part = torch.empty_strided(self.shape, self._stride, dtype=number, device="meta")[index]
        # The result lies in memory as in the file.
        order = sorted(range(part.dim()), key=part.stride().__getitem__, reverse=True)
        part = part.permute(order)
        tensor = torch.empty(part.shape, dtype=number, device="cpu")
        if tensor.numel():
            self._fill(tensor, part)
        back = [order.index(dim) for dim in range(len(order))]
        return tensor.permute(back).view(self.dtype)

    def _fill(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        """`part` has no memory: it says where in the file the bytes are."""
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


#: torch's whole numbers, by their bytes; the largest is a pair of floats, which is copied as it is
_NUMBERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _is_view(index: object) -> bool:
    """Whether such an index chooses without looking at the data."""
    if index is None or index is Ellipsis or isinstance(index, slice):
        return True
    return isinstance(index, Integral) and not isinstance(index, bool)


# ---- The tensors of a file ----------------------------------------------------------------------


def stored_tensors(file: VerifiedFile) -> dict[str, StoredTensor | str]:
    """By name, in the order of the file; or why nothing can be read of it but all by load().

    Raises:
        FormatError: it is no file of tensors.
        DamagedError: it does not fit together.
    """
    reader = file._reader
    if reader.is_torch_zip:
        return _of_zip(reader)
    if is_safetensors(reader.path):
        here = file.tell()
        try:
            file.seek(0)
            found = header.read(file, reader.file_bytes, reader.path)
        finally:
            file.seek(here)
        return {entry.name: of_safetensors(reader, entry) for entry in found.entries}
    raise failure(
        lib.IOSHAPE_E_FORMAT,
        f'cannot find tensors in "{reader.path}": it is neither a torch zip nor named .safetensors',
        reader.path,
        "load",
        remedy="read() it",
    )


def of_safetensors(reader: Reader, entry: Entry) -> StoredTensor:
    """One of a safetensors file."""
    shape = header.shape_in_torch(entry)
    verified: Literal["blocks", "no"] = "blocks" if reader.has_checksums else "no"
    return StoredTensor(
        reader,
        entry.name,
        DTYPES[entry.dtype][0],
        shape,
        header.contiguous(shape),
        entry.begin,
        verified,
    )


def _of_zip(reader: Reader) -> dict[str, StoredTensor | str]:
    records = reader.records()
    tensors, problem = tensors_of(reader, records)
    if problem:
        raise failure(
            lib.IOSHAPE_E_DAMAGED,
            f'cannot find the tensors of "{reader.path}": {problem}',
            reader.path,
            "load",
            remedy="use another copy or an older checkpoint",
        )
    by_name = {record.name: record for record in records}
    is_swapped = _byteorder(reader, by_name.get("byteorder")) != sys.byteorder
    found: dict[str, StoredTensor | str] = {}
    for tensor in tensors:
        if tensor.name in found:
            found[tensor.name] = "has the name of another one"
        elif is_swapped:
            found[tensor.name] = "is of a machine with another order of bytes"
        elif not tensor.is_plain:
            found[tensor.name] = "is more than numbers in a row"
        else:
            found[tensor.name] = _in_record(reader, tensor, by_name.get(tensor.record))
    return found


def _byteorder(reader: Reader, record: RawRecord | None) -> str:
    """Files from before there was such a record are of usual machines."""
    if record is None or not 0 < record.n_bytes < len(b"little") + 1:
        return "little"
    text = bytearray(record.n_bytes)
    reader.read_file(record.file_offset, memoryview(text))
    return text.decode(errors="replace")


def _in_record(reader: Reader, tensor: Tensor, record: RawRecord | None) -> StoredTensor | str:
    each = item_bytes(tensor.dtype)
    if each is None:
        return f"has the dtype {tensor.dtype}, which is not known here"
    lengths = zip(tensor.shape, tensor.stride, strict=True)
    span = 1 + sum((length - 1) * stride for length, stride in lengths)
    n_bytes = 0 if 0 in tensor.shape else tensor.storage_offset + span * each
    if n_bytes > (0 if record is None else record.n_bytes):
        raise failure(
            lib.IOSHAPE_E_DAMAGED,
            f"\"{reader.path}\" is damaged: tensor '{tensor.name}' does not lie in its record",
            reader.path,
            "load",
            remedy="use another copy or an older checkpoint",
        )
    verified: Literal["blocks", "whole", "no"] = "blocks" if reader.block_bytes else "whole"
    begin = 0 if record is None else record.file_offset + tensor.storage_offset
    return StoredTensor(
        reader,
        tensor.name,
        tensor.dtype,
        tensor.shape,
        tensor.stride,
        begin,
        verified if record is not None and record.crc32 else "no",
    )
