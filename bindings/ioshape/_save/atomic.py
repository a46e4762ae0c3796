# SPDX-License-Identifier: Apache-2.0
"""A file that is being written: it appears whole or not at all."""

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
from ioshape._core.errors import last_failure, warn_skipped
from ioshape._core.report import Report, Step, from_struct
from ioshape._core.structs import owned, sized
from ioshape._core.under_way import context_of_saves_to
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from types import TracebackType

    from ioshape._core.errors import StorageError
    from ioshape._save.begin import Payload
    from ioshape._save.request import SaveRequest

# Smaller writes are gathered to so much: a call of the library costs as much as copying some KiB.
_GATHERED_BYTES = 64 << 10
# In pieces: between two of them Python looks for signals, and Ctrl-C gets through.
_PIECE_BYTES = 16 << 20
_ZEROS_BYTES = 4 << 20


class Part(NamedTuple):
    """Of a file that several processes write at the same time."""

    #: both are multiples of PART_UNIT
    offset: int
    n_bytes: int
    #: about what all parts hold
    file_bytes: int


#: what parts begin and end at
PART_UNIT: int = lib.IOSHAPE_PART_UNIT


class _Sink(io.RawIOBase):
    """The library's file. Without commit() it leaves no trace."""

    def __init__(
        self,
        path: str,
        request: SaveRequest,
        begun: Report,
        expected_bytes: int,
        part: Part | None,
    ) -> None:
        self.name = path
        self.mode = "wb"
        self._begun = begun
        self._begin = time.perf_counter()
        self._report: Report | None = None
        # As for other saves: the context keeps the order of saves to one path.
        context = context_of_saves_to(path) or current()
        self._position = part.offset if part else 0
        options = sized("ioshape_file_options")
        request.set_in(options)
        options.expected_bytes = expected_bytes
        options.checksums = request.checksums
        if part is not None:
            options.part_offset, options.part_bytes, options.file_bytes = part
        # All of it happens on this thread: Ctrl-C gets through also while it waits for a slot.
        self._teller = Teller.for_signals()
        self._told = self._teller.set_in(options) if self._teller else None
        #: what it failed with first: callers may wrap it, or lose it
        self.failure: BaseException | None = None
        #: why nothing is written, as the setting "full" has it
        self.skipped: StorageError | None = None
        self._out = owned("file", context)
        self._pointer: Any = ffi.NULL
        code = lib.ioshape_file_open(context.pointer, encoded(path), options, self._out)
        self._pointer = self._out[0]
        try:
            self._check(code)
        except BaseException:
            self.end()
            raise

    def _check(self, code: int) -> None:
        if not code:
            return
        if code == lib.IOSHAPE_E_SKIPPED:
            # It has not failed: whoever writes goes on, to nowhere.
            self.skipped = last_failure(self.name, "save")
            self._let_go()
            return
        interruption = self._teller.failure if self._teller else None
        error = interruption or last_failure(self.name, "save")
        self.failure = self.failure or error
        raise error

    def writable(self) -> bool:
        """As for any file."""
        return True

    def write(self, data: Any) -> int:
        """Writes all of it, or the first piece. Into a file that was dropped, nothing."""
        piece = memoryview(data).cast("B")[:_PIECE_BYTES]
        if self._pointer != ffi.NULL:
            self._check(lib.ioshape_file_write(self._pointer, ffi.from_buffer(piece), piece.nbytes))
        self._position += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        """Where the next byte goes: bytes written so far, behind the beginning of the part."""
        return self._position

    def write_records(self, payload: Payload) -> None:
        """Writes a torch zip, as a part of the file."""
        if self._pointer == ffi.NULL:
            return
        n_bytes = ffi.new("uint64_t *")
        code = lib.save_file_write_records(self._pointer, payload.array, payload.length, n_bytes)
        for courier in payload.couriers if code else ():
            if courier.failure is not None:
                self.failure = self.failure or courier.failure
                raise courier.failure
        self._check(code)
        self._position += n_bytes[0]

    def write_zeros(self, n_bytes: int) -> None:
        """What is passed over."""
        zeros = memoryview(bytes(min(_ZEROS_BYTES, n_bytes)))
        end = self._position + n_bytes
        while self._position < end:
            self.write(zeros[: end - self._position])

    def commit(self) -> None:
        """Makes it durable and puts it in place."""
        if self.failure is not None:
            raise self.failure
        if self.skipped is not None:
            return
        struct = sized("ioshape_report")
        self._check(lib.ioshape_file_commit(self._pointer, struct))
        if self.skipped is not None:
            return
        begun = self._begun
        self._report = from_struct(
            begun.path, struct, written_by=begun.written_by, fallbacks=begun.fallbacks
        )

    def _let_go(self) -> None:
        self._pointer = ffi.NULL
        ffi.release(self._out)

    def end(self) -> Report | None:
        """Frees what C holds: of a file without a commit() nothing is left.

        What it did, or how it failed; None if somebody has dropped it.
        """
        self._let_go()
        begun, skipped = self._begun, self.skipped
        if self.failure is not None or skipped is not None:
            steps = begun.fallbacks + ((Step(skipped.sentence, "skipped"),) if skipped else ())
            took_s = time.perf_counter() - self._begin
            self._report = replace(
                begun, total_s=took_s, fallbacks=steps, skipped=skipped is not None
            )
        if self._report is not None:
            trace.record(self._report, error=self.failure)
        return self._report


class AtomicFile(io.BufferedWriter):
    """A file that is being written, as ioshape.open(path, "wb") gives it.

    Readers of the path see what was there before until close() has put the new file in place, as a
    whole and on stable storage. The end of a `with` block closes the file. If the block ends with
    an exception, or the file is never closed, it is dropped: nothing of it is left, and what was
    there before stays.

    It is an io.BufferedWriter. Small writes are gathered; large buffers are written from where they
    lie. It has no fileno(): what somebody writes by the descriptor would go past the checksums, the
    slots and the direct I/O. Bytes go from front to back. seek() can move forward, over zeros, and
    raises io.UnsupportedOperation for anything else; zipfile then writes archives without going
    back.
    """

    #: What the save did, once the file is closed; None before.
    report: Report | None

    def __init__(
        self,
        path: str,
        request: SaveRequest,
        *,
        expected_bytes: int = 0,
        part: Part | None = None,
        known_as: str = "",
        written_by: str = "caller",
        steps: tuple[Step, ...] = (),
    ) -> None:
        """Opens the file.

        Args:
            path: of the file.
            request: what the caller asked for.
            expected_bytes: what it will hold, if that is known.
            part: what this process writes of it; then the file has its name at once.
            known_as: for the report: the path that the file will have in the end, if it is moved.
            written_by: for the report: who makes the bytes.
            steps: for the report: what was not as preferred.
        """
        self._sink: _Sink | None = None  # until there is something to be dropped
        self.report = None
        begun = Report(known_as or path, written_by, fallbacks=steps, started_s=time.time())
        sink = _Sink(path, request, begun, expected_bytes, part)
        super().__init__(sink, _GATHERED_BYTES)
        self._sink = sink

    def seekable(self) -> bool:
        """False: there is no way back."""
        return False

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves forward; what is passed over is zeros.

        Raises:
            io.UnsupportedOperation: the place is not ahead. Only seek(0, os.SEEK_CUR) may stay.
        """
        here = self.tell()
        target = {os.SEEK_SET: offset, os.SEEK_CUR: here + offset}.get(whence, -1)
        # zipfile asks by a seek to where it is whether it may go back later.
        if target < here or (target == here and whence == os.SEEK_SET):
            raise io.UnsupportedOperation(f"cannot go back in {self.name}, which is being written")
        self.flush()
        if self._sink is not None:
            self._sink.write_zeros(target - here)
        return target

    def write_records(self, payload: Payload) -> None:
        """Writes a torch zip as a part of the file, from the memory of its storages."""
        self.flush()
        if self._sink is not None:
            self._sink.write_records(payload)

    def close(self) -> None:
        """Puts the file in place, on stable storage. A second call does nothing.

        If the file does not fit and the setting "full" is "skip", a SkippedWarning is given and the
        report's `skipped` is set.

        Raises:
            StorageError: the file could not be written, now or in an earlier call. What was there
                before stays.
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
        """Drops the file: nothing of it is left. After close() this does nothing."""
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
            # Somebody has wrapped it, as torch does: the program gets what there is to know.
            raise failure from error

    def __del__(self) -> None:
        if getattr(self, "_sink", None) is None or self.closed:
            return
        try:
            warnings.warn(
                f"{self!r} was not closed, so it is dropped", ResourceWarning, 2, source=self
            )
        finally:
            self.discard()
