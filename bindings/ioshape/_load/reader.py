# SPDX-License-Identifier: Apache-2.0
"""An open torch zip."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.callbacks import Teller
from ioshape._core.context import current, encoded
from ioshape._core.errors import Facts, StorageError, last_failure, raised_for
from ioshape._core.job import started_together
from ioshape._core.structs import Owner, said, sized
from ioshape._device.stretches import BLOCK_BYTES, OpenFile
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._core.report import Progress


class RawRecord(NamedTuple):
    """A member of the archive."""

    name: str
    n_bytes: int
    #: of its first byte of data
    file_offset: int
    crc32: int
    #: of each block, in memory of the reader; None if there are none
    blocks: Any = None


class Request(NamedTuple):
    """Bytes of a record, and where they are to be."""

    #: the record's number; 0 is all of a file that is no archive
    record: int
    offset: int
    n_bytes: int
    address: int


def can_read(error: StorageError) -> bool:
    """False if the file is none of ours to read, though torch may be able to.

    It is another format, larger than any of ours, or not a regular file.
    """
    return error.code not in (lib.IOSHAPE_E_FORMAT, lib.IOSHAPE_E_LIMIT, -errno.ESPIPE)


class Reader(Owner):
    """Reads and verifies records. For one thread at a time."""

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
        self._operation = operation
        self._verify = verify
        options = sized("ioshape_reader_options")
        options.verify = lib.IOSHAPE_ON if verify else lib.IOSHAPE_OFF
        # Where torch reads to has just been allocated, as a rule.
        options.fresh_memory = fresh
        # Whether other ranks of this host want the same bytes. Default: if the launcher has told
        # the library of any.
        if shared is not None:
            options.shared = lib.IOSHAPE_ON if shared else lib.IOSHAPE_OFF
        elif started_together():
            options.shared = lib.IOSHAPE_ON
        options.any_format = any_format
        self._teller = Teller(progress)
        self._keep = self._teller.set_in(options)
        if part is not None:
            # Offset and length of a member of a bundle; all offsets are its own.
            options.file_offset, options.file_bytes = part
        if opener is not None:
            opener(options, self._out)  # raises; by the generation that the file belongs to
        else:
            code = lib.ioshape_reader_open(context.pointer, encoded(path), options, self._out)
            if code:
                raise last_failure(path, operation)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file. A second call does nothing."""
        self._let_go()

    def _check(self, code: int) -> None:
        if not code:
            return
        if self._teller.failure is not None:
            raise self._teller.failure
        raise last_failure(self.path, self._operation)

    @property
    def file_bytes(self) -> int:
        """The length of the file, or of its part."""
        return int(self._info().file_bytes)

    @property
    def n_records(self) -> int:
        """How many it has."""
        return int(self._info().records)

    @property
    def is_torch_zip(self) -> bool:
        """Whether it is read as one; otherwise it has no records."""
        return bool(self._info().torch_zip)

    @property
    def has_checksums(self) -> bool:
        """Whether what is read can be verified."""
        return bool(self._info().checksums)

    @property
    def block_bytes(self) -> int:
        """How much has a checksum of its own; 0: only whole records have, if any."""
        return int(self._info().block_bytes)

    def crc32_of_all(self, record: RawRecord) -> int | None:
        """What is to be compared by who reads all of a record in parts; None: parts are verified,
        or nothing is."""
        if not self._verify or not self.has_checksums or self.block_bytes:
            return None
        # torch's skip_data() leaves 0 where somebody else brings the data.
        return record.crc32 or None

    def blocks_of(self, record: RawRecord) -> Any:
        """By number, the checksums of a record's blocks of a MiB; None if there are no such, or
        nobody wants to know."""
        return record.blocks if self._verify and self.block_bytes == BLOCK_BYTES else None

    def opened(self) -> OpenFile | None:
        """The file, for reads past the CPU; None if it cannot be read directly."""
        info = self._info()
        return (
            OpenFile(self.path, info.direct_fd, info.file_offset) if info.direct_fd >= 0 else None
        )

    def damaged(self, record: RawRecord) -> StorageError:
        """The error of a record of which somebody has computed another checksum."""
        return raised_for(
            Facts(
                lib.IOSHAPE_E_DAMAGED,
                f"\"{self.path}\" is damaged: the checksum of record '{record.name}' is wrong",
                self.path,
                self._operation,
                "use another copy or an older checkpoint",
                record.name,
                record.file_offset,
            )
        )

    def _info(self) -> Any:
        info = sized("ioshape_reader_info")
        self._check(lib.ioshape_reader_get_info(self._pointer, info))
        return info

    def records(self) -> list[RawRecord]:
        """All members, in the order of the file."""
        info = sized("ioshape_record_info")
        found = []
        for index in range(self._info().records):
            self._check(lib.ioshape_reader_get_record(self._pointer, index, info))
            blocks = info.block_crc32 or None
            found.append(
                RawRecord(said(info.name), info.bytes, info.file_offset, info.crc32, blocks)
            )
        return found

    def read_file(self, offset: int, into: memoryview) -> None:
        """Reads bytes of the file as it lies; those of records are verified."""
        self._check(
            lib.save_reader_read_file(
                self._pointer, offset, ffi.from_buffer(into, require_writable=True), into.nbytes
            )
        )

    def expect(self, record: int) -> None:
        """It and what follows it will be read: that begins now, and is not waited for."""
        self._check(lib.save_reader_expect(self._pointer, record))

    def read_records(
        self, requests: list[Request], told: Callable[[Progress], object] | None = None
    ) -> None:
        """Reads them in one pass, whatever their order. `told` hears how many bytes have come.

        All that is wanted should come with one call: the storage idles between two of them.
        """
        listed = ffi.new("struct ioshape_load_request[]", len(requests))
        for one, request in zip(listed, requests, strict=True):
            one.tensor, one.offset, one.bytes = request[:3]
            one.into = ffi.cast("void *", request.address)
        with self._teller.telling(told):
            self._check(lib.ioshape_reader_load_records(self._pointer, listed, len(requests)))

    def verify(self, share: float = 1.0) -> None:
        """Reads this share of it, and compares the checksums of that."""
        self._check(lib.ioshape_reader_verify(self._pointer, share))
