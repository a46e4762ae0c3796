# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, stopped while a load makes objects.

None of these objects is garbage, but the collector would look at all of them again and again: that
is a fifth of the time of many small tensors, and most of the time of a large description.

gc.disable() and gc.enable() are left to the program, which may call them in another thread
meanwhile. Instead, a threshold keeps the collector from starting by itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

from ioshape._core.locks import ForkedLock

if TYPE_CHECKING:
    from collections.abc import Iterator

#: of new objects until the collector starts. No load makes so many, and no program sets just that.
_NEVER = 2_000_000_011

_lock = ForkedLock()
#: an entry for each load under way
_loads: list[None] = []
_usual: tuple[int, ...] = ()


@contextlib.contextmanager
def collector_rests() -> Iterator[None]:
    """Keep the collector from starting by itself inside the block."""
    global _usual  # noqa: PLW0603
    try:
        with _lock:
            if not _loads:
                _usual = gc.get_threshold()
                gc.set_threshold(_NEVER, *_usual[1:])
            _loads.append(None)
        yield
    finally:
        with _lock:
            del _loads[-1:]  # a child has none
            if not _loads:
                _restore()


def _restore() -> None:
    # A program that has set a threshold meanwhile keeps it.
    if gc.get_threshold()[0] == _NEVER:
        gc.set_threshold(*_usual)


def _in_child() -> None:
    """Start the collector of a child that was forked beside a load, as DataLoader does."""
    if _loads:
        _loads.clear()
        _restore()


os.register_at_fork(after_in_child=_in_child)
