# SPDX-License-Identifier: Apache-2.0
"""Small new files of scripts under "ioshape run": atomic at once, and durable a moment later.

A script written for torch.save may save thousands of small files. It would wait for a slot and for
the disk at each. So torch writes such a file into memory. One write copies the bytes into a file
that has no name until it is complete. All such files are synced together.

A save that replaces a file with content takes the usual path, and is durable when the call returns.
So no earlier content can be lost.
"""

from __future__ import annotations

import fcntl
import io
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from ioshape import _torch as original
from ioshape._core import terminal as _terminal
from ioshape._core import trace, under_way
from ioshape._core.config import is_durable, value_of
from ioshape._core.descriptors import open_file
from ioshape._core.locks import module_lock
from ioshape._core.report import Downgrade, Report
from ioshape._native import ffi, lib

#: largest total of storages and strings in bytes; checkpoints are larger
MOST_BYTES = 64 << 10

#: most objects that are examined; an object with more counts as not small
_MOST_OBJECTS = 64


def save(obj: object, path: str, how: tuple[Any, ...], *, replaces: bool = False) -> bool:
    """Save a small object to a new file. Return False, without effect, if it is not both.

    `how` has the other arguments of torch.save. `replaces` says that an empty file is at the path,
    which is replaced. Exceptions of torch.save for objects that cannot be pickled are passed on.
    """
    if not _is_small(obj) or os.path.lexists(path) != replaces or not _may_wait(path):
        return False
    begin = time.perf_counter()
    content = io.BytesIO()
    original.save(obj, content, *how)
    # On any failure the caller takes the usual path, which succeeds or raises the right error.
    with suppress(OSError):
        is_synced = is_durable(None)
        _create(path, content.getbuffer(), replaces=replaces, is_synced=is_synced)
        if folder := value_of("trace"):
            total_s = time.perf_counter() - begin
            trace.record(folder, _report(path, content.tell(), total_s, is_synced=is_synced))
        return True
    return False


def _report(path: str, n_bytes: int, total_s: float, *, is_synced: bool) -> Report:
    downgrades = (
        (Downgrade("small file: synced shortly after, together with others", "sync"),)
        if is_synced
        else ()
    )
    return Report(path, "ioshape", n_bytes, total_s=total_s, downgrades=downgrades)


def _may_wait(path: str) -> bool:
    """Return whether the file may be synced later, and no other save to its path is in progress."""
    return (
        value_of("durable") is not True
        and not under_way.is_ending()
        and under_way.context_of_saves_to(path) is None
    )


def _is_small(obj: object) -> bool:
    """Return whether an object is small. Return False for objects of unknown types."""
    left = MOST_BYTES
    objects: list[Any] = [obj]
    for _ in range(_MOST_OBJECTS):
        if not objects:
            return True
        one = objects.pop()
        kind = type(one)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            # A tensor of another layout has several storages or none, so it does not count as
            # small.
            left -= one.untyped_storage().nbytes() if one.layout is torch.strided else MOST_BYTES
        elif kind is dict:
            objects += one.values()
            objects += one
        elif kind is list or kind is tuple:
            objects += one
        elif kind is str or kind is bytes:
            left -= len(one)
        elif one is not None and kind not in (bool, int, float):
            return False
        if left <= 0 or len(objects) > _MOST_OBJECTS:
            return False
    return not objects


def _create(path: str, content: memoryview, *, replaces: bool, is_synced: bool) -> None:
    """Create a file with this content, atomically for readers."""
    directory = os.path.dirname(path) or "."  # noqa: PTH120 - a Path takes longer than all of this
    file = open_file(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        if os.write(file, content) != len(content):
            raise OSError("there is not enough free space")
        name = path
        if replaces:
            _check_rights(os.fstat(file), os.lstat(path))
            name = f"{directory}/.{os.path.basename(path)}.ioshape-tmp-{os.getpid()}-{file}"  # noqa: PTH119
        # Python follows the link in /proc only if a directory's descriptor is passed. The path is
        # absolute, so the kernel ignores the descriptor.
        os.link(f"/proc/self/fd/{file}", name, src_dir_fd=file)
        if replaces:
            os.replace(name, path)  # noqa: PTH105
        if is_synced:
            add(path, file)
    finally:
        os.close(file)


def _check_rights(new: os.stat_result, old: os.stat_result) -> None:
    """Raise OSError unless the new file has the owner and the mode of the file it replaces."""
    if (new.st_mode, new.st_uid, new.st_gid) != (old.st_mode, old.st_uid, old.st_gid):
        raise OSError("the fast path cannot keep owner and mode")


# ---- Syncing together ----------------------------------------------------------------------------
#
# New small files that are synced together, a moment later or at the end of the process.
#
# A few files are synced one by one, because syncfs() is slow if other
# programs have written much to the filesystem. For many files syncfs() is faster nevertheless.

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
