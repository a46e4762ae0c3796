# SPDX-License-Identifier: Apache-2.0
"""A file object for writers of other formats, as safe as our own: atomic, durable, direct."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ioshape._c import owned, sized
from ioshape._errors import last_failure
from ioshape._native import ffi, lib
from ioshape._save.callbacks import Teller
from ioshape._save.deadline import left_ms
from ioshape._save.report import Report, Step, from_struct
from ioshape._save.under_way import context_of_saves_to
from ioshape._settings.context import current, encoded

if TYPE_CHECKING:
    from types import TracebackType

_PIECE_BYTES = 16 << 20
_ZEROS_BYTES = 4 << 20


class RawFile:
    """Takes bytes in order. Without commit() it leaves no trace."""

    def __init__(
        self, path: str, *, durable: bool, replace: bool, due: float | None = None
    ) -> None:
        self.name = path
        # As for other saves: the context keeps the order of saves to one path.
        context = context_of_saves_to(path) or current()
        self._position = 0
        options = sized("ioshape_file_options")
        options.sync = lib.IOSHAPE_ON if durable else lib.IOSHAPE_OFF
        options.replace = lib.IOSHAPE_ON if replace else lib.IOSHAPE_OFF
        options.deadline_ms = left_ms(due)
        # All of it happens on this thread: Ctrl-C gets through also while it waits for a slot.
        self._teller = Teller.for_reader(None)
        self._told = self._teller.set_in(options) if self._teller else None
        self._out = owned("file", context)
        code = lib.ioshape_file_open(context.pointer, encoded(path), options, self._out)
        if code:
            raise self._interruption() or last_failure(path, "save")
        self._pointer: Any = self._out[0]
        self.failure: Exception | None = None

    def _interruption(self) -> BaseException | None:
        return self._teller.failure if self._teller else None

    def _check(self, code: int) -> None:
        interruption = self._interruption() if code else None
        if interruption is not None:
            raise interruption
        if code:
            # torch wraps what its writer meets: kept, to be raised as it is.
            self.failure = last_failure(self.name, "save")
            raise self.failure

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes all of it."""
        view = memoryview(data).cast("B")
        # In pieces: between two of them Python looks for signals, and Ctrl-C gets through.
        for begin in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            self._check(lib.ioshape_file_write(self._pointer, ffi.from_buffer(piece), piece.nbytes))
            self._position += piece.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Forward only: what is passed over is zeros. torch does so under skip_data."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if base is None or base + offset < self._position:
            raise io.UnsupportedOperation(f"cannot go back in {self.name}, which is being written")
        zeros = memoryview(bytes(min(_ZEROS_BYTES, base + offset - self._position)))
        while self._position < base + offset:
            self.write(zeros[: base + offset - self._position])
        return self._position

    def flush(self) -> None:
        """Nothing to do: commit() does it."""

    def commit(self, note: str) -> Report:
        """Makes it durable and puts it in place."""
        struct = sized("ioshape_report")
        self._check(lib.ioshape_file_commit(self._pointer, struct))
        return from_struct(self.name, struct, written_by="torch", fallbacks=(Step(note, "torch"),))

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        ffi.release(self._out)
        if self.failure is not None and error is not self.failure:
            raise self.failure from error
