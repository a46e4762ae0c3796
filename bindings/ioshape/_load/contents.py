# SPDX-License-Identifier: Apache-2.0
"""inspect() and verify(): a file's records and tensors, without unpickling or torch."""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ioshape._core.config import tier_folder
from ioshape._core.errors import DamagedError, StorageError, failure, holding
from ioshape._formats import safetensors as header
from ioshape._formats.dtypes import DTYPES
from ioshape._load.pickled import Tensor, item_bytes, list_tensors
from ioshape._load.reader import Reader, Record
from ioshape._native import lib
from ioshape._tier.drain import nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from ioshape._core.report import Progress

# A pickle holds names and numbers. This is enough for half a million tensors.
_MAX_PICKLE_BYTES = 1 << 26
_LONGEST_REASON = 200
#: suffix of the name of the file of checksums beside a safetensors file
SUFFIX = ".ioshape-sums"
#: suffixes of the names of all files that ioshape writes beside a file
BESIDE = (SUFFIX, ".ioshape-stats")
# The unit of the checksums beside a file.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Contents:
    """The records and tensors of a file, as inspect() returns them."""

    #: The path of the file that was read, which may be a copy on a tier.
    path: str
    #: The size of the file in bytes.
    file_bytes: int
    #: The records in the order of the file.
    records: tuple[Record, ...]
    #: The tensors in the order of the pickle; empty if there are none, or if there is a `problem`.
    tensors: tuple[Tensor, ...]
    #: A reason why the tensors could not be listed; "" if they were.
    problem: str = ""


def contents_of(reader: Reader) -> Contents:
    """Return the records and tensors of an open file.

    A safetensors file has a single record, which holds all tensors, one after the other.

    Raises:
        FormatError: The file is neither a torch zip nor a safetensors file with that suffix.
        DamagedError: The structure of the file is damaged.
    """
    if reader.is_torch_zip:
        records = reader.records()
        tensors, problem = _tensors_of_zip(reader, records)
        return Contents(reader.path, reader.file_bytes, tuple(records), tensors, problem)
    if not is_safetensors(reader.path):
        raise failure(
            lib.IOSHAPE_E_FORMAT,
            f'cannot find tensors in "{reader.path}": it is neither a torch zip nor named '
            ".safetensors",
            reader.path,
            reader.operation,
            remedy="read() it",
        )
    found = header_of(reader)
    data = data_of(found, reader.file_bytes)
    tensors = tuple(tensor_of(entry, data) for entry in found.entries)
    return Contents(reader.path, reader.file_bytes, (data,), tensors)


def _tensors_of_zip(reader: Reader, records: list[Record]) -> tuple[tuple[Tensor, ...], str]:
    """Return the tensors, and why they could not be listed."""
    entry = next((record for record in records if record.name == "data.pkl"), None)
    if entry is None:
        return (), "it has no record data.pkl"
    if entry.n_bytes > _MAX_PICKLE_BYTES:
        return (), f"its pickle is larger than {_MAX_PICKLE_BYTES} bytes"
    try:
        pickle = reader.read_bytes(entry.file_offset, entry.n_bytes)
        return list_tensors(io.BytesIO(pickle), reader.file_bytes), ""
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        return (), f"its pickle cannot be read ({str(error)[:_LONGEST_REASON]})"


# ---- Files of safetensors, recognised by name ----------------------------------------------------


def is_safetensors(path: str) -> bool:
    return path.endswith(".safetensors")


def header_of(reader: Reader) -> header.Header:
    """Return the header of a safetensors file, checked against the file's size."""
    return header.read(reader.read_bytes, reader.file_bytes, reader.path, reader.operation)


def data_of(found: header.Header, file_bytes: int) -> Record:
    """Return the bytes of all tensors of a safetensors file as a record."""
    begin = found.entries[0].begin if found.entries else file_bytes
    return Record("data", file_bytes - begin, begin, 0)


def tensor_of(entry: header.Entry, data: Record) -> Tensor:
    """Return a tensor of a safetensors file."""
    shape = header.shape_in_torch(entry)
    return Tensor(
        entry.name,
        DTYPES[entry.dtype][0],
        shape,
        header.contiguous(shape),
        data.name,
        entry.begin - data.file_offset,
        "cpu",
    )


# ---- The public functions ----------------------------------------------------------------------


def inspect(path: str | os.PathLike[str]) -> Contents:
    """List the records and tensors of a file without reading their data.

    Nothing is unpickled, and torch is not imported. If the setting "tier" is set, the copy on the
    tier is inspected, unless the file at the path is newer. Any thread may call this.

    Args:
        path: The path of a torch zip, or of a safetensors file named *.safetensors.

    Returns:
        Contents. Its `problem` says why if the tensors of a torch zip cannot be listed.

    Raises:
        FormatError: The file is neither a torch zip nor a safetensors file with that suffix.
        DamagedError: The structure of the file is damaged.
        StorageError: The file could not be read. It is an OSError with errno and path.
    """
    return nearest(os.fspath(path), tier_folder(None), _inspect)


def _inspect(name: str) -> Contents:
    with Reader(name, operation="inspect", any_format=is_safetensors(name)) as reader:
        return contents_of(reader)


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    progress: Callable[[Progress], object] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> None:
    """Read a file and compare its checksums. Return if all of them match.

    Any thread may call this.

    Args:
        path: The path of a torch zip, or of any file with checksums beside it.
        quick: Whether to check only the structure of the archive. Default: read all data.
        progress: A function that is called with a Progress from time to time. An exception in it
            stops the call, which raises it. Default: none.
        tier: As in load(). Default: the setting "tier".

    Raises:
        DamagedError: A checksum does not match; the message names the tensor and the offset. Or the
            file of checksums beside it (`NAME.ioshape-sums`) is damaged.
        FormatError: The file is not a torch zip, and has no valid checksums beside it.
        StorageError: The file could not be read. Its errno is ENODATA if the file has no checksums.
    """
    nearest(os.fspath(path), tier_folder(tier), lambda name: _verify(name, quick, progress))


def _verify(name: str, quick: bool, progress: Callable[[Progress], object] | None) -> None:
    with Reader(name, operation="verify", progress=progress, any_format=True) as reader:
        if is_safetensors(name) and not reader.is_torch_zip:
            header_of(reader)  # raises an error if the structure is damaged
        elif not reader.is_torch_zip and not reader.has_checksums:
            if os.path.lexists(name + SUFFIX):
                reader.verify()  # raises an error that says why those checksums are not valid
            Reader(name, operation="verify").close()  # raises an error that says what is wrong
        try:
            reader.verify(quick=quick)
        except DamagedError as error:
            raise name_damage(error, reader) from None


def name_damage(error: DamagedError, reader: Reader) -> DamagedError:
    """Return the error of a read with the names of the tensors in the damaged bytes added."""
    try:
        found = contents_of(reader)
    except StorageError:
        return error
    if reader.is_torch_zip:
        names = [one.name for one in found.tensors if one.record == error.record]
    else:
        data = found.records[0].file_offset
        names = [one.name for one in found.tensors if _is_damaged(one, data, error.offset)]
    if not names:
        return error
    # A tensor that was saved without a container has no name.
    shown = ", ".join(f"'{name}'" if name else "the tensor" for name in names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return holding(error, shown)


def _is_damaged(tensor: Tensor, data: int, offset: int | None) -> bool:
    """Return whether a tensor of a safetensors file has bytes in the block at an offset."""
    begin = data + tensor.storage_offset
    end = begin + math.prod(tensor.shape) * (item_bytes(tensor.dtype) or 0)
    return offset is not None and begin < offset + _BLOCK_BYTES and end > offset
