# SPDX-License-Identifier: Apache-2.0
"""Reader: an open file whose records are read and verified."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.callbacks import Teller
from ioshape._core.context import current, encoded
from ioshape._core.errors import StorageError, damaged, failure, last_failure
from ioshape._core.job import started_together
from ioshape._core.report import ALARMS
from ioshape._core.structs import Owner, said, shared_fields, sized
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._core.report import Progress


@dataclass(frozen=True)
class Record:
    """A record: a member of the archive."""

    #: The name, relative to the archive's folder, such as "data/0".
    name: str
    #: The size of the data in bytes.
    n_bytes: int
    #: The offset in the file of the data, in bytes.
    file_offset: int
    #: The checksum of the data; 0 if there is none.
    crc32: int

    @property
    def alignment(self) -> int:
        """The largest power of two up to 4096 that divides file_offset."""
        return min(self.file_offset & -self.file_offset or 4096, 4096)


class Statistics(NamedTuple):
    """Statistics of the numbers in a record. A complex element counts as two numbers."""

    #: the library's number of the dtype
    dtype: int
    numbers: int
    nans: int
    infinities: int
    zeros: int
    #: smallest and largest finite number; infinity and minus infinity if there is none
    minimum: float
    maximum: float
    sum_squares: float
    #: what was wrong with the record when it was saved
    alarms: tuple[str, ...]

    @classmethod
    def of_all(cls, parts: list[Statistics]) -> Statistics:
        """Return the statistics of a tensor from those of its parts."""
        return cls(
            parts[0].dtype,
            numbers=sum(one.numbers for one in parts),
            nans=sum(one.nans for one in parts),
            infinities=sum(one.infinities for one in parts),
            zeros=sum(one.zeros for one in parts),
            minimum=min(one.minimum for one in parts),
            maximum=max(one.maximum for one in parts),
            sum_squares=sum(one.sum_squares for one in parts),
            alarms=tuple(dict.fromkeys(alarm for one in parts for alarm in one.alarms)),
        )


class Request(NamedTuple):
    """A range of bytes of a record, and the address to read it to."""

    #: index of the record; 0 is the whole file if it is no archive
    record: int
    offset: int
    n_bytes: int
    address: int


def unhealthy(path: str, alarms: Iterable[str], operation: str) -> StorageError:
    """Return the error for a checkpoint whose save raised alarms."""
    return failure(
        lib.IOSHAPE_E_ALARM,
        f'the content of "{path}" looked wrong when it was saved ({", ".join(alarms)})',
        path,
        operation,
        remedy='load an older checkpoint, or look at it with "ioshape inspect --stats"',
    )


class Reader(Owner):
    """An open file that reads and verifies records. One thread at a time may use it."""

    def __init__(
        self,
        path: str,
        *,
        verify: bool = True,
        part: tuple[int, int] | None = None,
        opener: Callable[[Any, Any], None] | None = None,
        operation: str = "load",
        progress: Callable[[Progress], object] | None = None,
        fresh: bool = True,
        any_format: bool = False,
        shared: bool | None = None,
    ) -> None:
        context = current()
        super().__init__("reader", path, context)
        self.path = path
        self.operation = operation
        self._verify = verify
        options = sized("ioshape_reader_options")
        options.verify = lib.IOSHAPE_ON if verify else lib.IOSHAPE_OFF
        # The memory that torch reads into has usually just been allocated.
        options.fresh_memory = fresh
        # Whether other ranks of this host read the same bytes. By default the library decides by
        # the variables of the launcher, which multiprocessing does not set.
        if shared is not None:
            options.shared = lib.IOSHAPE_ON if shared else lib.IOSHAPE_OFF
        elif started_together():
            options.shared = lib.IOSHAPE_ON
        options.any_format = any_format
        self._teller = Teller(progress)
        self._keep = self._teller.set_in(options)
        if part is not None:
            # The offset and the length of a shard in its shard file. All other offsets are then
            # relative.
            options.file_offset, options.file_bytes = part
        if opener is not None:
            opener(options, self._out)  # opens the file through its checkpoint; raises on failure
        else:
            code = lib.ioshape_reader_open(context.pointer, encoded(path), options, self._out)
            if code:
                raise last_failure(path, operation)
        self._info = info = sized("ioshape_reader_info")
        self._check(lib.ioshape_reader_get_info(self._pointer, info))
        #: size in bytes of the file, or of the shard
        self.file_bytes: int = info.file_bytes
        self.n_records: int = info.records
        #: whether the file is read as a torch zip; otherwise it has no records
        self.is_torch_zip: bool = bool(info.torch_zip)
        #: whether the file has checksums, so that reads are verified
        self.has_checksums: bool = bool(info.checksums)
        #: bytes that have a checksum of their own; 0 if at most whole records have one
        self.block_bytes: int = info.block_bytes

    def _check(self, code: int) -> None:
        if not code:
            return
        if self._teller.failure is not None:
            raise self._teller.failure
        raise last_failure(self.path, self.operation)

    def check_healthy(self) -> None:
        """Raise a StorageError if the save of this file raised an alarm."""
        found = self._info.alarms
        if found:
            names = [name for bit, name in ALARMS.items() if found & bit]
            raise unhealthy(self.path, names, self.operation)

    def add_to(self, items: Any, name: str, alarms: int) -> None:
        """Add the tensor of this archive to the struct save_items of a checkpoint."""
        self._check(lib.save_items_add_loaded(items, self._pointer, name.encode(), alarms))

    def statistics(self, record: int) -> Statistics | None:
        """Return the statistics of a record; None if it was not examined."""
        found = sized("ioshape_statistics")
        if not self._info.examined:
            return None
        self._check(lib.ioshape_reader_get_statistics(self._pointer, record, found))
        if not found.dtype:
            return None
        alarms = tuple(name for bit, name in ALARMS.items() if found.alarms & bit)
        told = shared_fields(Statistics, found)
        return Statistics(**{**told, "numbers": found.count, "alarms": alarms})

    def crc32_of_all(self, record: Record) -> int | None:
        """Return the checksum that a caller who reads a record in pieces must compare.

        Return None if the reader verifies the pieces, or if nothing is to be verified.
        """
        if not self._verify or not self.has_checksums or self.block_bytes:
            return None
        # torch's skip_data() leaves a checksum of 0, because another program writes the data.
        return record.crc32 or None

    def damaged(self, record: Record) -> StorageError:
        """Return the error for a record whose checksum a caller has found to be wrong."""
        why = f"the checksum of record '{record.name}' is wrong"
        return damaged(
            self.path, why, self.operation, record=record.name, offset=record.file_offset
        )

    def records(self) -> list[Record]:
        """Return all records, in the order of the file."""
        info = sized("ioshape_record_info")
        found = []
        for index in range(self.n_records):
            self._check(lib.ioshape_reader_get_record(self._pointer, index, info))
            found.append(Record(said(info.name), info.bytes, info.file_offset, info.crc32))
        return found

    def block_checksums(self, record: int) -> list[int]:
        """Return the checksum of each block of a record; empty if the file has none."""
        count = ffi.new("uint64_t *")
        checks = lib.save_reader_checks(self._pointer, record, count)
        return ffi.unpack(checks, count[0]) if checks else []

    def read_file(self, offset: int, into: memoryview) -> None:
        """Read a range of the file into memory. Bytes of records are verified."""
        self._check(
            lib.save_reader_read_file(
                self._pointer, offset, ffi.from_buffer(into, require_writable=True), into.nbytes
            )
        )

    def read_bytes(self, offset: int, n_bytes: int) -> bytearray:
        """Return a range of the file. Bytes of records are verified."""
        data = bytearray(n_bytes)
        if data:
            self.read_file(offset, memoryview(data))
        return data

    def prefetch(self, record: int) -> None:
        """Start to prefetch a record and those behind it. Do not wait."""
        self._check(lib.save_reader_prefetch(self._pointer, record))

    def read_records(
        self, requests: list[Request], told: Callable[[Progress], object] | None = None
    ) -> None:
        """Read ranges of records in one pass, in any order. Call `told` with the progress.

        A caller should pass all its ranges in one call, because the storage idles between two
        calls.
        """
        listed = ffi.new("struct ioshape_load_request[]", len(requests))
        for one, request in zip(listed, requests, strict=True):
            one.tensor, one.offset, one.bytes = request[:3]
            one.into = ffi.cast("void *", request.address)
        with self._teller.telling(told):
            self._check(lib.ioshape_reader_load_records(self._pointer, listed, len(requests)))

    def verify(self, *, quick: bool = False) -> None:
        """Read the data and compare its checksums. With `quick` check only the structure."""
        self._check(lib.ioshape_reader_verify(self._pointer, not quick))


def open_if_ours(path: str, **options: Any) -> Reader | None:
    """Open a file with options of Reader; return None if only torch may be able to read it.

    Such a file has a format that is not ioshape's, is larger than any of ioshape's, or is not a
    regular file.
    """
    try:
        return Reader(path, **options)
    except StorageError as error:
        if error.code not in (lib.IOSHAPE_E_FORMAT, lib.IOSHAPE_E_LIMIT, -errno.ESPIPE):
            raise
        return None
