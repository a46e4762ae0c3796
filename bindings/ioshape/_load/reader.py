# SPDX-License-Identifier: Apache-2.0
"""An open torch zip."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._c import owned, said, sized
from ioshape._errors import StorageError, last_failure
from ioshape._native import ffi, lib
from ioshape._save.callbacks import Teller
from ioshape._settings.context import current, encoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._files.checksums import Checksums
    from ioshape._save.report import Progress


class RawRecord(NamedTuple):
    """A member of the archive."""

    name: str
    n_bytes: int
    #: of its first byte of data
    file_offset: int
    crc32: int


def can_read(error: StorageError) -> bool:
    """False if the file is none of ours to read, though torch may be able to.

    It is another format, larger than any of ours, or not a regular file.
    """
    return error.code not in (lib.IOSHAPE_E_FORMAT, lib.IOSHAPE_E_LIMIT, -errno.ESPIPE)


class Reader:
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
        checksums: Checksums | None = None,
    ) -> None:
        self.path = path
        self._operation = operation
        context = current()
        options = sized("ioshape_reader_options")
        options.verify = lib.IOSHAPE_ON if verify else lib.IOSHAPE_OFF
        # Where torch reads to has just been allocated, as a rule.
        options.fresh_memory = fresh
        # Of a file in another format: what is known of it, or lies beside it.
        options.any_format = any_format or checksums is not None
        if checksums is not None:
            self._checksums = checksums.as_struct()  # as long as the library may look at it
            options.checksums = self._checksums[0]
        self._teller = Teller.for_reader(progress)
        if part is not None:
            # Offset and length of a member of a bundle; all offsets are its own.
            options.file_offset, options.file_bytes = part
        if self._teller is not None:
            self._keep = self._teller.set_in(options)
        self._out = owned("reader", context)
        if opener is not None:
            opener(options, self._out)  # raises; by the generation that the file belongs to
        else:
            code = lib.ioshape_reader_open(context.pointer, encoded(path), options, self._out)
            if code:
                raise last_failure(path, operation)
        self._pointer: Any = self._out[0]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file. A second call does nothing."""
        ffi.release(self._out)

    def _check(self, code: int) -> None:
        if not code:
            return
        if self._teller is not None and self._teller.failure is not None:
            raise self._teller.failure
        raise last_failure(self.path, self._operation)

    @property
    def file_bytes(self) -> int:
        """The length of the file, or of its part."""
        return int(self._info().file_bytes)

    @property
    def is_torch_zip(self) -> bool:
        """Whether it is read as one; otherwise it has no records."""
        return bool(self._info().torch_zip)

    @property
    def has_checksums(self) -> bool:
        """Whether what is read can be verified."""
        return bool(self._info().checksums)

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
            found.append(RawRecord(said(info.name), info.bytes, info.file_offset, info.crc32))
        return found

    def read_file(self, offset: int, into: memoryview) -> None:
        """Reads bytes of the file as it lies; those of records are verified."""
        self._check(
            lib.ioshape_reader_read_file(
                self._pointer, offset, ffi.from_buffer(into, require_writable=True), into.nbytes
            )
        )

    def verify(self, share: float = 1.0) -> None:
        """Reads this share of it, and compares the checksums of that."""
        self._check(lib.ioshape_reader_verify(self._pointer, share))
