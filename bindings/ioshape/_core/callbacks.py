# SPDX-License-Identifier: Apache-2.0
"""Adapters that let C call progress callbacks written in Python."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ioshape._core.report import PHASES, Progress
from ioshape._core.structs import called_from_c, keep_failure, said
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Teller:
    """Adapter that C calls with progress, and that passes it on to a Python callback.

    An exception in the callback stops the operation. `failure` keeps the exception, so that the
    caller can raise it.
    """

    def __init__(
        self, callback: Callable[[Progress], object] | None, c_function: Any = None
    ) -> None:
        self.callback = callback or _ignore
        self.failure: BaseException | None = None
        self._c_function = c_function or lib.ioshape_py_progress
        self._place: tuple[int, str, float] = (0, "", 0.0)

    @classmethod
    def for_save(cls, callback: Callable[[Progress], object] | None) -> Teller | None:
        """Return an adapter for a save, or None if C need not call Python at all.

        Without a callback, the main thread still gets an adapter. Python handles signals such as
        Ctrl-C only while it runs bytecode. While the caller's thread copies, or waits for staging
        memory, C must therefore call Python now and then. On the writing thread such calls would
        only compete for the GIL, so that adapter is called for staging alone.
        """
        if callback is not None:
            return cls(callback)
        if threading.current_thread() is threading.main_thread():
            return cls(None, ffi.addressof(lib, "ioshape_py_progress_of_stage"))
        return None

    @classmethod
    def for_signals(cls) -> Teller | None:
        """Return an adapter without a callback that only lets Ctrl-C through.

        Return None on any thread but the main thread, because Python handles signals on the main
        thread alone.
        """
        return cls(None) if threading.current_thread() is threading.main_thread() else None

    @contextlib.contextmanager
    def telling(self, callback: Callable[[Progress], object] | None) -> Iterator[None]:
        """Send progress to this callback inside the block. If it is None, keep the current one."""
        before = self.callback
        self.callback = callback or before
        try:
            yield
        finally:
            self.callback = before

    def tell(self, phase: int, done_bytes: int, total_bytes: int) -> None:
        """Call the Python callback. C calls this through ioshape_py_progress()."""
        name = PHASES.get(phase, "unknown")
        place = self._place if name == "wait" else ()
        self.callback(Progress(name, done_bytes, total_bytes, *place))

    def tell_place(self, place: Any) -> None:
        """Remember the position in the queue for the next tell().

        C calls this through ioshape_py_queue() while a save waits for a slot, just before it
        reports the phase "wait".
        """
        self._place = (place.position, said(place.ahead), place.waited_s)

    def set_in(self, options: Any, *, queue: bool = False) -> Any:
        """Set the callback in an option struct and return the handle that C passes back.

        The caller must keep the handle alive for as long as C uses the struct. The handle refers to
        this object. This object does not refer to the handle, because such a cycle would stay in
        memory until the garbage collector runs.
        """
        handle = ffi.new_handle(self)
        options.progress = self._c_function
        options.progress_user = handle
        if queue and self.callback is not _ignore:
            options.queue = lib.ioshape_py_queue
            options.queue_user = handle
        return handle


def _ignore(_progress: Progress) -> None:
    pass


@called_from_c(error=-1, onerror=keep_failure)
def ioshape_py_progress(teller: Teller, phase: int, done_bytes: int, total_bytes: int) -> int:
    teller.tell(phase, done_bytes, total_bytes)
    return 0


@called_from_c(error=-1, onerror=keep_failure)
def ioshape_py_queue(teller: Any, place: Any) -> int:
    teller.tell_place(place)
    return 0


QUEUE = lib.ioshape_py_queue
