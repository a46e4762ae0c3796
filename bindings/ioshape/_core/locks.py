# SPDX-License-Identifier: Apache-2.0
"""Locks of modules, forks, and signals."""

from __future__ import annotations

import os
import threading


class ForkedLock:
    """A lock for a module. A forked child has a free one: a thread of the parent may have held it.

    The handler of a signal may save, between any two steps of what its thread is doing: so a thread
    that holds it can take it again, and what it protects is whole between any two steps.

    Make none for what comes and goes: the interpreter keeps it for ever.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
