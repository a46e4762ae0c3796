# SPDX-License-Identifier: Apache-2.0
"""inspect() and verify(): a file's records and tensors, without unpickling or torch."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ioshape._core.config import tier_folder
from ioshape._core.errors import DamagedError, StorageError
from ioshape._formats import safetensors as header
from ioshape._formats.dtypes import DTYPES
from ioshape._load.pickled import Tensor, list_tensors
from ioshape._load.reader import RawRecord, Reader
from ioshape._load.verified import VerifiedFile
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
class Record:
    """A record: a member of the archive."""

    #: The name, relative to the archive's folder, such as "data/0".
    name: str
    #: The size of the data in bytes.
    n_bytes: int
    #: The offset in the file of the data, in bytes.
    file_offset: int
    #: The largest power of two up to 4096 that divides file_offset.
    alignment: int
    #: The checksum of the data; 0 if there is none.
    crc32: int


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


def tensors_of(reader: Reader, records: list[RawRecord]) -> tuple[tuple[Tensor, ...], str]:
    entry = next((record for record in records if record.name == "data.pkl"), None)
    if entry is None:
        return (), "it has no record data.pkl"
    if entry.n_bytes > _MAX_PICKLE_BYTES:
        return (), f"its pickle is larger than {_MAX_PICKLE_BYTES} bytes"
    data = io.BytesIO(bytes(entry.n_bytes))
    try:
        if entry.n_bytes:
            with data.getbuffer() as view:
                reader.read_file(entry.file_offset, view)
        return list_tensors(data, reader.file_bytes), ""
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        return (), f"its pickle cannot be read ({str(error)[:_LONGEST_REASON]})"


# ---- Files of safetensors, recognised by name ----------------------------------------------------


def is_safetensors(path: str) -> bool:
    return path.endswith(".safetensors")


def _header_of(path: str, operation: str) -> tuple[header.Header, int]:
    """Return the header, checked against the file's size, and that size."""
    with VerifiedFile(path) as file:
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        return header.read(file, file_bytes, path, operation), file_bytes


def _inspect_safetensors(path: str) -> Contents:
    """Describe the file as a single record that holds all tensors, one after the other."""
    found, file_bytes = _header_of(path, "inspect")
    begin = found.entries[0].begin if found.entries else file_bytes
    record = Record("data", file_bytes - begin, begin, min(begin & -begin, 4096), 0)
    tensors = []
    for entry in found.entries:
        shape = header.shape_in_torch(entry)
        tensors.append(
            Tensor(
                entry.name,
                DTYPES[entry.dtype][0],
                shape,
                header.contiguous(shape),
                record.name,
                entry.begin - begin,
                "cpu",
            )
        )
    return Contents(path, file_bytes, (record,), tuple(tensors))


def _name_in_safetensors(error: DamagedError, found: header.Header) -> DamagedError:
    if error.offset is None:
        return error
    first, last = error.offset, error.offset + _BLOCK_BYTES
    return _naming(
        error, [entry.name for entry in found.entries if entry.begin < last and entry.end > first]
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
    if is_safetensors(name):
        return _inspect_safetensors(name)
    with Reader(name, operation="inspect") as reader:
        raw = reader.records()
        tensors, problem = tensors_of(reader, raw)
        return Contents(
            name,
            reader.file_bytes,
            tuple(
                Record(
                    record.name,
                    record.n_bytes,
                    record.file_offset,
                    min(record.file_offset & -record.file_offset or 4096, 4096),
                    record.crc32,
                )
                for record in raw
            ),
            tensors,
            problem,
        )


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
    found = _header_of(name, "verify")[0] if is_safetensors(name) else None
    with Reader(name, operation="verify", progress=progress, any_format=True) as reader:
        if not reader.is_torch_zip and not reader.has_checksums and found is None:
            if os.path.lexists(name + SUFFIX):
                reader.verify()  # raises an error that says why those checksums are not valid
            Reader(name, operation="verify").close()  # raises an error that says what is wrong
        try:
            reader.verify(quick=quick)
        except DamagedError as error:
            named = name_damage(error) if found is None else _name_in_safetensors(error, found)
            raise named from None


def name_damage(error: DamagedError, part: tuple[int, int] | None = None) -> DamagedError:
    """Return the error with the names of the tensors in the damaged record added.

    `part` is the offset and the length of a shard in its shard file.
    """
    if error.record is None:
        return error
    try:
        with Reader(error.filename, part=part, operation="inspect") as reader:
            tensors, _problem = tensors_of(reader, reader.records())
    except (StorageError, ValueError):
        return error
    return _naming(error, [tensor.name for tensor in tensors if tensor.record == error.record])


def _naming(error: DamagedError, names: list[str]) -> DamagedError:
    if not names:
        return error
    # A tensor that was saved without a container has no name.
    shown = ", ".join(f"'{name}'" if name else "the tensor" for name in names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return DamagedError(error.facts._replace(sentence=f"{error.sentence}, which holds {shown}"))
