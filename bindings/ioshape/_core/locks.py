# SPDX-License-Identifier: Apache-2.0
"""Locks for modules that survive forks and signal handlers."""

from __future__ import annotations

import os
import threading


def module_lock() -> threading.RLock:
    """Return a reentrant lock for a module, which is free again in a forked child.

    In a child the lock must be new, because a thread of the parent may have held it.

    The handler of a signal may save between any two bytecodes of its thread. So a thread that holds
    the lock can take it again. What the lock protects must therefore be consistent between any two
    bytecodes.

    Use it for modules only, not for objects that come and go. The interpreter keeps the fork hook,
    and with it the lock, for ever.
    """
    lock = threading.RLock()
    # Python's own modules renew their locks so. typeshed does not list the method.
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
