# SPDX-License-Identifier: Apache-2.0
"""Progress callbacks in Python, called from C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ioshape._native import ffi, lib
from ioshape._report import PHASES, Progress

if TYPE_CHECKING:
    from collections.abc import Callable


class Teller:
    """Takes a progress callback to C. An exception in it stops the operation and is kept."""

    def __init__(self, callback: Callable[[Progress], object]) -> None:
        self.callback = callback
        self.failure: BaseException | None = None
        self.handle = ffi.new_handle(self)

    def tell(self, phase: int, done_bytes: int, total_bytes: int) -> int:
        try:
            self.callback(Progress(PHASES.get(phase, "unknown"), done_bytes, total_bytes))
        except BaseException as error:
            self.failure = error
            return -1
        return 0

    def set_in(self, options: Any) -> None:
        """Puts the callback into an option struct."""
        options.progress = lib.ioshape_py_progress
        options.progress_user = self.handle


@ffi.def_extern(error=-1)  # type: ignore[untyped-decorator]
def ioshape_py_progress(user: Any, phase: int, done_bytes: int, total_bytes: int) -> int:
    teller: Teller = ffi.from_handle(user)
    return teller.tell(phase, done_bytes, total_bytes)
