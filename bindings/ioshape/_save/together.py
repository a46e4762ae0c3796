# SPDX-License-Identifier: Apache-2.0
"""New files that are synced together, a moment later and at the end of the process.

Only those of small.py.
"""

from __future__ import annotations

import os
import threading

from ioshape import _terminal
from ioshape._descriptors import open_file
from ioshape._locks import ForkedLock
from ioshape._native import ffi, lib
from ioshape._save import under_way

#: How long a file is in place before the sync begins.
WITHIN_S = 1.0

#: Directories that have new files since the last sync, and a descriptor of each.
_waiting: dict[str, int] = {}
_has_thread = False
_ends = threading.Event()  # the process does
_syncing = ForkedLock()


def add(path: str) -> None:
    """Has a new file, which is in place, synced soon."""
    global _has_thread  # noqa: PLW0603
    directory = os.path.dirname(path) or "."  # noqa: PTH120 - a Path takes longer than all of this
    if directory in _waiting:
        return
    # Held open: by the time of the sync the directory may have another name, and "." be another.
    try:
        descriptor = open_file(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        _lost(directory, error)
        return
    if _waiting.setdefault(directory, descriptor) != descriptor:
        os.close(descriptor)  # another thread, or the handler of a signal, was quicker
    if not _has_thread:
        _has_thread = True
        threading.Thread(target=_sync_later, name="ioshape", daemon=True).start()


def _sync_later() -> None:
    global _has_thread  # noqa: PLW0603
    _ends.wait(WITHIN_S)
    # What is added from here on may not be among what is taken: another thread comes for it.
    _has_thread = False
    _sync()


def _sync() -> None:
    """One call for each filesystem: the kernel writes all files in few large requests."""
    with _syncing:
        synced: set[int] = set()
        while _waiting:
            directory, descriptor = _waiting.popitem()
            try:
                device = os.fstat(descriptor).st_dev
                if device not in synced and lib.syncfs(descriptor):
                    raise OSError(ffi.errno, os.strerror(ffi.errno))
                synced.add(device)
            except OSError as error:
                _lost(directory, error)
            finally:
                os.close(descriptor)


def _lost(directory: str, error: OSError) -> None:
    _terminal.say(
        f'cannot sync the small files that were saved to "{directory}" in the last moments: '
        f"{error.strerror}; save them again, or set durable=1 to learn of it at each save"
    )
    under_way.end_nonzero()


@under_way.after_saves
def _finish() -> None:
    """The end of the process."""
    _ends.set()
    _sync()


def _forget() -> None:
    """A forked child has nothing to sync, and no thread."""
    global _ends, _has_thread  # noqa: PLW0603
    _has_thread = False
    _ends = threading.Event()  # whose lock the thread may have held
    while _waiting:
        os.close(_waiting.popitem()[1])


os.register_at_fork(after_in_child=_forget)
