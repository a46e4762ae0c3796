# SPDX-License-Identifier: Apache-2.0
"""What lies in a file: inspect() and verify(). Nothing of the file is run, nor torch imported."""

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
from ioshape._load.sums import SUFFIX
from ioshape._load.verified import VerifiedFile
from ioshape._tier.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from ioshape._core.report import Progress

# A pickle holds names and numbers. Half a million tensors take so much.
_MAX_PICKLE_BYTES = 1 << 26
_LONGEST_REASON = 200
# Of checksums that lie beside a file.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Record:
    """A member of the archive."""

    name: str
    n_bytes: int
    #: where in the file its data begins
    file_offset: int
    #: the largest power of two up to 4096 that file_offset is a multiple of
    alignment: int
    crc32: int


@dataclass(frozen=True)
class Contents:
    """What lies in a file."""

    path: str
    file_bytes: int
    records: tuple[Record, ...]
    #: in the order of the pickle; empty if there are none, or if `problem` says why
    tensors: tuple[Tensor, ...]
    #: why the tensors could not be listed; "" if they were
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


# ---- safetensors files, which their names tell ---------------------------------------------------


def is_safetensors(path: str) -> bool:
    return path.endswith(".safetensors")


def _header_of(path: str, operation: str) -> tuple[header.Header, int]:
    """It is checked against the file's length, which is told, too."""
    with VerifiedFile(path) as file:
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        return header.read(file, file_bytes, path, operation), file_bytes


def _inspect_safetensors(path: str) -> Contents:
    """As one record, in which the tensors lie one behind the other."""
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


# ---- What users call ---------------------------------------------------------------------------


def inspect(path: str | os.PathLike[str]) -> Contents:
    """Lists the records and tensors of a file. Their data is not read.

    With the setting "tier" it is the copy there, unless there is a newer file at the path.

    Raises:
        FormatError: the file is not a torch zip, nor a safetensors file of that name.
        StorageError: the file could not be read.
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
    share: float = 1.0,
    progress: Callable[[Progress], object] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> None:
    """Reads all of a file and compares all of its checksums.

    Returns if every one is right.

    Args:
        path: of the file.
        share: of the data that is read, from 1 (all) to 0 (none: only whether the archive's
            structure holds). A share is spread evenly over the file, each time over another place.
        progress: is called with a Progress now and then; an exception in it stops the call.
        tier: as in load().

    Raises:
        DamagedError: one is not; the message names the tensor and where it lies. Or the file of
            checksums beside it (`NAME.ioshape-sums`) is damaged itself.
        FormatError: the file is not a torch zip, and no checksums lie beside it.
        StorageError: the file could not be read; with errno ENODATA if it has no checksums.
    """
    nearest(os.fspath(path), tier_folder(tier), lambda name: _verify(name, share, progress))


def _verify(name: str, share: float, progress: Callable[[Progress], object] | None) -> None:
    found = _header_of(name, "verify")[0] if is_safetensors(name) else None
    with Reader(name, operation="verify", progress=progress, any_format=True) as reader:
        if not reader.is_torch_zip and not reader.has_checksums and found is None:
            if os.path.lexists(name + SUFFIX):
                reader.verify()  # raises, and says why the checksums there do not count
            Reader(name, operation="verify").close()  # raises, and says what is wrong with it
        try:
            reader.verify(share)
        except DamagedError as error:
            named = name_damage(error) if found is None else _name_in_safetensors(error, found)
            raise named from None


def name_damage(error: DamagedError, part: tuple[int, int] | None = None) -> DamagedError:
    """The same error, with the names of the tensors that lie in the damaged record.

    `part` is where a member of a bundle lies in its file.
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
    # A tensor that was saved by itself has no name.
    shown = ", ".join(f"'{name}'" if name else "the tensor" for name in names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return DamagedError(error.facts._replace(sentence=f"{error.sentence}, which holds {shown}"))
