# SPDX-License-Identifier: Apache-2.0
"""New small files that are synced together, a moment later or at the end of the process.

Only small.py uses this. A few files are synced one by one, because syncfs() is slow if other
programs have written much to the filesystem. For many files syncfs() is faster nevertheless.
"""

from __future__ import annotations

import fcntl
import os
import threading

from ioshape._core import terminal as _terminal
from ioshape._core import under_way
from ioshape._core.descriptors import open_file
from ioshape._core.locks import module_lock
from ioshape._native import ffi, lib

#: seconds that new files are gathered before a sync begins
WITHIN_S = 1.0

#: most files that are synced one by one
_FEW = 16


class _Waiting:
    """The new files since the last sync."""

    def __init__(self) -> None:
        #: an open descriptor of each directory, by path
        self.directories: dict[str, int] = {}
        #: directory and descriptor of the first files; of all files, if they are few
        self.files: list[tuple[str, int]] = []

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in (*self.directories.values(), *(file for _, file in self.files)):
            os.close(descriptor)


_waiting = _Waiting()
_adding = module_lock()
_has_thread = False
_ends = threading.Event()  # set when the process ends
_syncing = module_lock()


def add(path: str, file: int) -> None:
    """Have a new file synced soon. It is in place, and `file` is its open descriptor."""
    global _has_thread  # noqa: PLW0603
    directory = os.path.dirname(path) or "."  # noqa: PTH120 - a Path takes longer than all of this
    with _adding:
        waiting = _waiting
        try:
            if len(waiting.files) <= _FEW:
                waiting.files.append((directory, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)))
            # The directory is held open, because it may be renamed before the sync.
            if directory not in waiting.directories:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                waiting.directories[directory] = open_file(directory, flags)
        except OSError as error:
            _lost(directory, error)
    if not _has_thread:
        _has_thread = True
        threading.Thread(target=_sync_later, name="ioshape", daemon=True).start()


def _sync_later() -> None:
    global _has_thread  # noqa: PLW0603
    _ends.wait(WITHIN_S)
    # _sync() may miss a file that is added from here on, so such a file starts another thread.
    _has_thread = False
    _sync()


def _sync() -> None:
    global _waiting
    with _syncing:
        with _adding:
            waiting, _waiting = _waiting, _Waiting()
        each = [*waiting.directories.items()]
        is_few = len(waiting.files) <= _FEW
        if is_few:
            each[:0] = waiting.files
        failures: dict[str, OSError] = {}
        synced: set[int] = set()
        for directory, descriptor in each:
            device = os.fstat(descriptor).st_dev
            try:
                if is_few:
                    os.fsync(descriptor)
                elif device not in synced:
                    _syncfs(descriptor)
                synced.add(device)
            except OSError as error:
                failures.setdefault(directory, error)
        waiting.close()
        for directory, failure in failures.items():
            _lost(directory, failure)


def _syncfs(descriptor: int) -> None:
    """Sync a filesystem. The kernel then writes all files in few large requests."""
    if lib.syncfs(descriptor):
        raise OSError(ffi.errno, os.strerror(ffi.errno))


def _lost(directory: str, error: OSError) -> None:
    _terminal.say(
        f'cannot sync the small files that were saved to "{directory}" just before: '
        f"{error.strerror}; save them again, or set durable=1 so that each save reports this"
    )
    under_way.end_nonzero()


@under_way.after_saves
def _finish() -> None:
    """Sync the remaining files at the end of the process."""
    _ends.set()
    _sync()


def _forget() -> None:
    """Forget the files in a forked child, which has no thread and nothing to sync."""
    global _ends, _has_thread, _waiting  # noqa: PLW0603
    _has_thread = False
    _ends = threading.Event()  # the parent's thread may have held the lock of the old one
    waiting, _waiting = _waiting, _Waiting()
    waiting.close()


os.register_at_fork(after_in_child=_forget)
