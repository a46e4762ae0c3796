# SPDX-License-Identifier: Apache-2.0
"""Progress callbacks in Python, called from C."""

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
    """Takes a progress callback to C. An exception in it stops the operation and is kept."""

    def __init__(
        self, callback: Callable[[Progress], object] | None, c_function: Any = None
    ) -> None:
        self.callback = callback or _ignore
        self.failure: BaseException | None = None
        self._c_function = c_function or lib.ioshape_py_progress
        self._place: tuple[int, str, float] = (0, "", 0.0)

    @classmethod
    def for_save(cls, callback: Callable[[Progress], object] | None) -> Teller | None:
        """Tells the user; or nobody, for the sake of Ctrl-C.

        Signals are looked for between the steps of a callback. While the caller's thread copies, or
        waits for staging memory, that is needed in any case. On the writing thread it would only
        take the GIL.
        """
        if callback is not None:
            return cls(callback)
        if threading.current_thread() is threading.main_thread():
            return cls(None, ffi.addressof(lib, "ioshape_py_progress_of_stage"))
        return None

    @classmethod
    def for_signals(cls) -> Teller | None:
        """Tells nobody, for the sake of Ctrl-C; None on a thread that gets no signals."""
        return cls(None) if threading.current_thread() is threading.main_thread() else None

    @contextlib.contextmanager
    def telling(self, callback: Callable[[Progress], object] | None) -> Iterator[None]:
        """Meanwhile somebody else is told, if anybody."""
        before = self.callback
        self.callback = callback or before
        try:
            yield
        finally:
            self.callback = before

    def tell(self, phase: int, done_bytes: int, total_bytes: int) -> None:
        """What the library calls."""
        name = PHASES.get(phase, "unknown")
        place = self._place if name == "wait" else ()
        self.callback(Progress(name, done_bytes, total_bytes, *place))

    def tell_place(self, place: Any) -> None:
        """The same while a save waits for its turn, just before tell()."""
        self._place = (place.position, said(place.ahead), place.waited_s)

    def set_in(self, options: Any, *, queue: bool = False) -> Any:
        """Puts the callback into an option struct. What it gives must live as long as that is used.

        (It refers to this object; if this object referred to it, neither would go before the
        garbage collector comes.)
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
