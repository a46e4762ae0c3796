# SPDX-License-Identifier: Apache-2.0
"""Locks of modules, and forks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class ForkedLock:
    """A lock for a module. A forked child has a free one: a thread of the parent may have held it.

    Make none for what comes and goes: the interpreter keeps it for ever.
    """

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = self._make()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
