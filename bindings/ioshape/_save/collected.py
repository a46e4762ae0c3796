# SPDX-License-Identifier: Apache-2.0
"""Saves that a framework would wait for, begun in the background for whoever waits for all."""

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
    """What replaces a framework's saves begins them, while this block runs."""
    token = _handles.set([])
    try:
        yield
    finally:
        _handles.reset(token)


def begun() -> list[SaveHandle] | None:
    """Those of the block so far; None outside of one."""
    return _handles.get()


def begins(begin: Callable[[], SaveHandle]) -> bool:
    """Begins a save, if that is what is wanted here."""
    handles = _handles.get()
    if handles is not None:
        handles.append(begin())
    return handles is not None
