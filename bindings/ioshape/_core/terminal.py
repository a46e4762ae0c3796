# SPDX-License-Identifier: Apache-2.0
"""Messages of the package on stderr, and a status line there that disappears after a wait."""

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

#: seconds after which a wait is shown
LONG_S = 2.0

_line = ""  # the status line that the terminal shows now
_waits = False  # the main thread is waiting for a slot, however short the wait is so far


def say(text: str) -> None:
    """Print a line that stays."""
    clear()
    _write(f"ioshape: {harmless(text)}\n")


def can_show() -> bool:
    """Return whether this thread may show a status line.

    It must be the main thread of the node's first rank, because the ranks of a node share the
    terminal.
    """
    try:
        return (
            threading.current_thread() is threading.main_thread()
            and sys.stderr.isatty()
            and job().local_rank == 0
        )
    except (AttributeError, ValueError):  # stderr is closed or gone
        return False


def show(before: str, path: str, after: str) -> None:
    """Show `before`, `path` and `after` as the status line. Shorten a long path at its start."""
    global _line  # noqa: PLW0603
    before, path, after = map(one_line, (before, path, after))
    columns = 0
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    # A line as wide as the terminal would wrap, and could not be erased.
    width = max(8, (columns or 80) - 1 - len("ioshape: " + before + after))
    if len(path) > width:
        path = "…" + path[1 - width :]
    line = f"ioshape: {before}{path}{after}"
    if line != _line:
        _write("\r" + line.ljust(len(_line)))
        _line = line


def clear() -> None:
    """Erase the status line."""
    global _line  # noqa: PLW0603
    if _line:
        _write("\r" + " " * len(_line) + "\r")
        _line = ""


def set_waiting(waits: bool) -> None:
    """Set whether the main thread waits for a slot. False also erases the status line.

    While it is True, a log line about the wait is not printed, because the status line will show
    it.
    """
    global _waits  # noqa: PLW0603
    _waits = waits
    if not waits:
        clear()


@contextlib.contextmanager
def shown(
    before: str, path: str, progress: Callable[[Progress], object] | None
) -> Iterator[Callable[[Progress], object] | None]:
    """Yield the callback to call with progress: `progress`, plus a status line if possible.

    The status line appears after LONG_S seconds and is erased at the end of the block.
    """
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
    """Return whether the status line shows a long wait, or will show it."""
    return _waits


def _write(text: str) -> None:
    # Errors are ignored: stderr may be closed, its reader may be gone, or a signal handler may have
    # interrupted a write to it (RuntimeError).
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        sys.stderr.write(text)
        sys.stderr.flush()
