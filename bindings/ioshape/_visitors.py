# SPDX-License-Identifier: Apache-2.0
"""Threads of the library that run Python for a moment."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# As private as they are: without them all is as if nobody tidied up.
_known: dict[int, Any] = getattr(threading, "_active", {})
_lock: contextlib.AbstractContextManager[Any] = getattr(
    threading, "_active_limbo_lock", contextlib.nullcontext()
)


@contextlib.contextmanager
def visiting() -> Iterator[None]:
    """Around what asks for the current thread, as logging does.

    A thread that is not Python's is kept in `threading` for ever then, with a name of its own. This
    one is gone when it returns to C.
    """
    thread = threading.get_ident()
    was_known = thread in _known
    try:
        yield
    finally:
        if not was_known:
            with _lock:
                _known.pop(thread, None)
