# SPDX-License-Identifier: Apache-2.0
"""Background saves instead of a framework's blocking saves, collected for one wait.

Inside in_background(), the functions that replace a framework's saves use begins(). The owner of
the block waits for all of them.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._save.handle import SaveHandle

_handles: ContextVar[list[SaveHandle] | None] = ContextVar("ioshape_collected", default=None)


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Make saves of frameworks start in the background inside this block."""
    token = _handles.set([])
    try:
        yield
    finally:
        _handles.reset(token)


def begun() -> list[SaveHandle] | None:
    """Return the saves that the current block has started; None outside of a block."""
    return _handles.get()


def begins(begin: Callable[[], SaveHandle]) -> bool:
    """Start a save if a block of in_background() is active. Return whether it did."""
    handles = _handles.get()
    if handles is not None:
        handles.append(begin())
    return handles is not None
