# SPDX-License-Identifier: Apache-2.0
"""A pause for Python's garbage collector while a load creates objects.

None of these objects is garbage, but the collector would traverse all of them again and again. That
would take a fifth of the time of a load of many small tensors, and most of the time of a large
pickle.

Use it for regular files only: a read from a pipe may take long, and the collector would stay off.

The program may call gc.disable() and gc.enable() in another thread meanwhile. So the pause uses
neither, and raises a threshold that keeps the collector from starting by itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

from ioshape._core.locks import module_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Threshold in new objects. No load creates so many, and no program sets exactly this value.
_NEVER = 2_000_000_011

_lock = module_lock()
#: one entry for each load in progress
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
            del _loads[-1:]  # in a child that was forked meanwhile the list is empty
            if not _loads:
                _restore()


def _restore() -> None:
    # If the program has set a threshold meanwhile, keep that.
    if gc.get_threshold()[0] == _NEVER:
        gc.set_threshold(*_usual)


def _in_child() -> None:
    """Restart the collector in a child that was forked during a load, as DataLoader does."""
    if _loads:
        _loads.clear()
        _restore()


os.register_at_fork(after_in_child=_in_child)
