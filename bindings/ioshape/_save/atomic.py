# SPDX-License-Identifier: Apache-2.0
"""Files that are being written and that appear complete or not at all."""

from __future__ import annotations

import io
import os
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core import trace
from ioshape._core.callbacks import Teller
from ioshape._core.context import current, encoded
from ioshape._core.descriptors import open_file
from ioshape._core.errors import last_failure, warn_skipped
from ioshape._core.report import Downgrade, Report
from ioshape._core.structs import Owner, owned, sized
from ioshape._native import ffi, lib
from ioshape._save.handle import report_of

if TYPE_CHECKING:
    from types import TracebackType

    from ioshape._core.errors import StorageError
    from ioshape._save.items import Items
    from ioshape._save.request import Payload, SaveRequest


# Smaller writes are gathered into blocks of this size. A call of the library costs as much as
# copying a few KiB.
_GATHERED_BYTES = 64 << 10
# The most bytes of one call of the library. Python handles signals such as Ctrl-C between two
# calls.
_PIECE_BYTES = 16 << 20
_ZEROS_BYTES = 4 << 20


class Part(NamedTuple):
    """The byte range that this process writes of a file that several processes write together."""

    #: begin and length in bytes; both are multiples of PART_UNIT
    offset: int
    n_bytes: int
    #: approximate size in bytes of the whole file
    file_bytes: int


#: alignment in bytes of the begin and the end of each part
PART_UNIT: int = lib.IOSHAPE_PART_UNIT


class _Sink(io.RawIOBase):
    """Raw file of the library, below AtomicFile's buffer. Without commit() it leaves no trace."""

    def __init__(
        self,
        request: SaveRequest,
        begun: Report,
        expected_bytes: int,
        part: Part | None,
        items: Items | None,
    ) -> None:
        self.name = request.path
        self.mode = "wb"
        self._items = items  # the library borrows it
        self._begun = begun
        self._begin = time.perf_counter()
        self._report: Report | None = None
        self._trace = request.context.trace
        context = request.ordered_context()
        self._position = part.offset if part else 0
        options = sized("ioshape_file_options")
        request.set_in(options)
        options.expected_bytes = expected_bytes
        options.checksums = request.checksums
        if part is not None:
            options.part_offset, options.part_bytes, options.file_bytes = part
        # The library writes on this thread. So Ctrl-C must get through, also during the wait for a
        # slot.
        self._teller = Teller.for_signals()
        self._told = self._teller.set_in(options) if self._teller else None
        #: the first failure; a caller may have wrapped or swallowed the exception
        self.failure: BaseException | None = None
        #: why nothing is written, if the file did not fit and the setting "full" is "skip"
        self.skipped: StorageError | None = None
        self._out = owned("file", context)
        self._pointer: Any = ffi.NULL
        code = lib.ioshape_file_open(context.pointer, encoded(self.name), options, self._out)
        self._pointer = self._out[0]
        try:
            self._check(code)
            if items is not None and self._pointer != ffi.NULL:
                self._check(lib.save_file_examine(self._pointer, items.pointer))
        except BaseException:
            self.end()
            raise

    def _check(self, code: int) -> None:
        if not code:
            return
        if code == lib.IOSHAPE_E_SKIPPED:
            # A skipped save is no failure. The program goes on writing, and the bytes are
            # discarded.
            self.skipped = last_failure(self.name, "save")
            self._let_go()
            return
        interruption = self._teller.failure if self._teller else None
        error = interruption or last_failure(self.name, "save")
        self.failure = self.failure or error
        raise error

    def writable(self) -> bool:
        """Return True, as any file open for writing does."""
        return True

    def write(self, data: Any) -> int:
        """Write the data, or its first piece, and return the number of bytes.

        After the library's file was freed, as for a skipped save, discard them.
        """
        piece = memoryview(data).cast("B")[:_PIECE_BYTES]
        if self._pointer != ffi.NULL:
            self._check(lib.ioshape_file_write(self._pointer, ffi.from_buffer(piece), piece.nbytes))
        self._position += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        """Return the offset in the file of the next byte."""
        return self._position

    def write_records(self, name: str, payload: Payload) -> None:
        """Write a torch zip at the current offset."""
        if self._pointer == ffi.NULL:
            return
        n_bytes = ffi.new("uint64_t *")
        code = lib.save_file_write_records(
            self._pointer, name.encode(), payload.array, payload.length, n_bytes
        )
        for courier in payload.couriers if code else ():
            if courier.failure is not None:
                self.failure = self.failure or courier.failure
                raise courier.failure
        self._check(code)
        self._position += n_bytes[0]

    def write_zeros(self, n_bytes: int) -> None:
        """Write zeros, for the range that a seek has jumped over."""
        zeros = memoryview(bytes(min(_ZEROS_BYTES, n_bytes)))
        end = self._position + n_bytes
        while self._position < end:
            self.write(zeros[: end - self._position])

    def commit(self) -> None:
        """Make the file durable and rename it into place. Do nothing if it was skipped."""
        if self.failure is not None:
            raise self.failure
        if self.skipped is not None:
            return
        struct = sized("ioshape_report")
        self._check(lib.ioshape_file_commit(self._pointer, struct))
        if self.skipped is not None:
            return
        begun = self._begun
        self._report = report_of(
            begun.path, struct, written_by=begun.written_by, downgrades=begun.downgrades
        )

    def _let_go(self) -> None:
        self._pointer = ffi.NULL
        ffi.release(self._out)

    def end(self) -> Report | None:
        """Free the C object and return the report. A file without commit() leaves nothing.

        Return None if the program has dropped the file.
        """
        self._let_go()
        begun, skipped = self._begun, self.skipped
        if self.failure is not None or skipped is not None:
            downgrades = begun.downgrades + (
                (Downgrade(skipped.sentence, "skipped"),) if skipped else ()
            )
            took_s = time.perf_counter() - self._begin
            self._report = replace(
                begun, total_s=took_s, downgrades=downgrades, skipped=skipped is not None
            )
        if self._report is not None:
            trace.record(self._trace, self._report, error=self.failure)
        return self._report


class AtomicFile(io.BufferedWriter):
    """A file that is being written, as ioshape.open(path, "wb") returns it.

    Readers of the path see the previous file until close() has made the new file durable and
    renamed it into place. The end of a `with` block closes the file. If the block ends with an
    exception, or if the file is never closed, the new file is dropped. Nothing of it is left, and
    the previous file stays.

    It is an io.BufferedWriter. Small writes are gathered; large buffers are written without a copy
    into the buffer. It has no fileno(), because writes to a descriptor would bypass the checksums,
    the slots and the direct I/O.

    Bytes go from front to back. seek() can only move forward, over zeros, and otherwise raises
    io.UnsupportedOperation. zipfile then writes archives as a stream.

    One thread at a time may use a file. Different threads may write different files.
    """

    #: The report of the save once the file is closed or dropped; None before that.
    report: Report | None

    def __init__(
        self,
        request: SaveRequest,
        *,
        expected_bytes: int = 0,
        part: Part | None = None,
        items: Items | None = None,
        known_as: str = "",
        written_by: str = "caller",
    ) -> None:
        """Open the file.

        Args:
            request: The path and the options of the caller.
            expected_bytes: The approximate size of the file, to reserve its space; 0 if unknown.
            part: The range that this process writes of a shared file. The file has its final name
                at once then.
            items: The examined tensors of a checkpoint, to which those of write_records() are
                added.
            known_as: The path for the report, if the file will be moved to it later.
            written_by: The writer of the bytes, for the report.
        """
        self._sink: _Sink | None = None  # __del__ may run before the file is open
        self.report = None
        begun = Report(
            known_as or request.path,
            written_by,
            downgrades=request.downgrades,
            started_s=time.time(),
        )
        sink = _Sink(request, begun, expected_bytes, part, items)
        super().__init__(sink, _GATHERED_BYTES)
        self._sink = sink

    def seekable(self) -> bool:
        """Return False, because bytes that were written cannot be revisited."""
        return False

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move forward to an offset. The bytes in between are zeros. Return the offset.

        Raises io.UnsupportedOperation if the offset is not ahead. Only seek(0, os.SEEK_CUR) may
        stay at the current offset.
        """
        here = self.tell()
        target = {os.SEEK_SET: offset, os.SEEK_CUR: here + offset}.get(whence, -1)
        # zipfile seeks to the current offset to find out whether the file is seekable.
        if target < here or (target == here and whence == os.SEEK_SET):
            raise io.UnsupportedOperation(f"cannot seek back in {self.name} while it is written")
        self.flush()
        if self._sink is not None:
            self._sink.write_zeros(target - here)
        return target

    def write_records(self, name: str, payload: Payload) -> None:
        """Write a torch zip at the current offset, directly from the memory of its storages.

        `name` is that of its tensor in alarms.
        """
        self.flush()
        if self._sink is not None:
            self._sink.write_records(name, payload)

    def close(self) -> None:
        """Make the file durable and rename it into place. A second call does nothing.

        If the file does not fit and the setting "full" is "skip", it issues a SkippedWarning and
        sets the report's `skipped`. Raises StorageError if this or an earlier call failed to write
        the file. The previous file stays then.
        """
        sink = self._sink
        if sink is None or self.closed:
            return
        try:
            self.flush()
            sink.commit()
        finally:
            self._end(sink)
        if sink.skipped is not None:
            warn_skipped(sink.name, sink.skipped.sentence)

    def discard(self) -> None:
        """Drop the file, so that nothing of it is left. After close() this does nothing."""
        if self._sink is not None and not self.closed:
            self._end(self._sink)

    def _end(self, sink: _Sink) -> None:
        self.report = sink.end()
        super().close()

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self.discard()
        failure = None if self._sink is None else self._sink.failure
        if failure is not None and error is not failure and isinstance(error, Exception):
            # A caller such as torch has wrapped the failure. The original has the details that the
            # program needs.
            raise failure from error

    def __del__(self) -> None:
        if getattr(self, "_sink", None) is None or self.closed:
            return
        try:
            warnings.warn(
                f"{self!r} was not closed, so its data is discarded",
                ResourceWarning,
                2,
                source=self,
            )
        finally:
            self.discard()


# ---- Directories ---------------------------------------------------------------------------------


class Directory(Owner):
    """A directory in progress. Without commit() it leaves no trace, even after a kill."""

    def __init__(self, path: str) -> None:
        context = current()
        super().__init__("directory", path, context)
        self.name = path
        if lib.save_directory_make(context.pointer, encoded(path), self._out):
            raise last_failure(path, "save")
        #: temporary path to fill until commit(); other processes may also create files there
        self.path = os.fsdecode(ffi.string(lib.save_directory_path(self._pointer)))

    def commit(self) -> None:
        """Rename the directory to its final name, durably.

        Raise FileExistsError if that name is taken, except by an empty directory.
        """
        if lib.save_directory_commit(self._pointer):
            raise last_failure(self.name, "save")


def sync(path: str) -> None:
    """Bring a file, or the names in a directory, to stable storage. Return when it is done."""
    fd = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
