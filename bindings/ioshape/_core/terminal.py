# SPDX-License-Identifier: Apache-2.0
"""What the package says on stderr, and the line there that shows a wait and goes away again."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from ioshape._core.job import job
from ioshape._core.text import harmless, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._core.report import Progress

#: What takes longer is shown.
LONG_S = 2.0

_line = ""  # what stands there now
_waits = False  # whoever may show it is waiting for a slot, however short a time so far


def say(text: str) -> None:
    """A line that stays."""
    clear()
    _write(f"ioshape: {harmless(text)}\n")


def can_show() -> bool:
    """Whether this thread may show a wait: where there is a terminal, one of those who share it."""
    try:
        return (
            threading.current_thread() is threading.main_thread()
            and sys.stderr.isatty()
            and job().local_rank == 0
        )
    except (AttributeError, ValueError):  # there is no stderr any more
        return False


def show(before: str, path: str, after: str) -> None:
    """Writes it in the place of what stands there; of a long path only the end."""
    global _line  # noqa: PLW0603
    before, path, after = map(one_line, (before, path, after))
    columns = 0
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    # A line that is as wide as the terminal would go on in the next, and could not be erased.
    room = max(8, (columns or 80) - 1 - len("ioshape: " + before + after))
    if len(path) > room:
        path = "…" + path[1 - room :]
    line = f"ioshape: {before}{path}{after}"
    if line != _line:
        _write("\r" + line.ljust(len(_line)))
        _line = line


def clear() -> None:
    """Leaves no trace of it."""
    global _line  # noqa: PLW0603
    if _line:
        _write("\r" + " " * len(_line) + "\r")
        _line = ""


def set_waiting(waits: bool) -> None:
    """From now on a line is shown as soon as the wait is long; or not any more, which erases it."""
    global _waits  # noqa: PLW0603
    _waits = waits
    if not waits:
        clear()


@contextlib.contextmanager
def shown(
    before: str, path: str, progress: Callable[[Progress], object] | None
) -> Iterator[Callable[[Progress], object] | None]:
    """Who is to be told how far a file has come: `progress`, and the terminal if it takes long."""
    if not can_show():
        yield progress
        return
    began = time.monotonic()

    def tell(now: Progress) -> None:
        if progress is not None:
            progress(now)
        if now.total_bytes and time.monotonic() - began >= LONG_S:
            show(before, path, f": {now.done_bytes / now.total_bytes:.0%}")

    try:
        yield tell
    finally:
        clear()


def is_waiting() -> bool:
    """Whether a long wait is shown, or will be: nobody else need say so."""
    return _waits


def _write(text: str) -> None:
    # There may be no stderr left, or nobody who reads it; or a signal's handler has interrupted
    # somebody who is writing there (RuntimeError).
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        sys.stderr.write(text)
        sys.stderr.flush()
