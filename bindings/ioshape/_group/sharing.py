# SPDX-License-Identifier: Apache-2.0
"""One process of a host brings bytes to the page cache, the others find them there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_PIECE_BYTES = 4 << 20

#: More of the memory that is free than this is not taken for it.
_MOST_OF_MEMORY = 0.5

# Who waits longer reads by itself: whoever is before it may be stopped.
_PATIENCE_S = 600.0

_NOBODY = 65534

# Places that are looked at to learn whether all of it is there.
_SAMPLES = 64


def brought_by_one(
    path: str, offset: int, n_bytes: int, turn: Callable[[], AbstractContextManager[Any]]
) -> bool:
    """Returns when these bytes of a file are in the page cache: True.

    The one who reads them from the storage does so in its `turn`. False if something hinders it,
    which is no failure: they are then to be read from the storage.
    """
    with contextlib.suppress(OSError):
        if n_bytes > _MOST_OF_MEMORY * _available_bytes():
            return False
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _alone(file, offset) as has_waited:
                is_there = _is_there(file, offset, n_bytes)
                if is_there is None:
                    is_there = has_waited  # for somebody who brought it
                if not is_there:
                    with turn():
                        _bring(file, offset, n_bytes)
            return True
        finally:
            os.close(file)
    return False


@contextlib.contextmanager
def _alone(file: int, offset: int) -> Iterator[bool]:
    """One process of this user on this host at a time; whether it had to wait for another one.

    A lock of the file would reach to other hosts, which have page caches of their own, and to other
    users. The kernel drops the lock when its process ends, however that ends.
    """
    identity = os.fstat(file)
    what = f"{identity.st_dev} {identity.st_ino} {offset}"
    byte = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "little")
    end = time.monotonic() + _PATIENCE_S
    has_waited = False
    locks = _open_locks()
    try:
        while True:
            try:
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    raise
            has_waited = True
            time.sleep(0.02)
        yield has_waited
    finally:
        os.close(locks)


def _open_locks() -> int:
    """A file in memory that no other user can open, empty; each range has a byte of it to lock."""
    user = os.geteuid()
    path = f"/dev/shm/ioshape-{user}"  # as the notes and streams of a host have it
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        # In a user namespace, "nobody" is every user that has no number there.
        if found.st_uid != user or found.st_mode & 0o077 or user == _NOBODY:
            raise PermissionError(errno.EACCES, "it is not this user's alone", path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open("reads", flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _is_there(file: int, offset: int, n_bytes: int) -> bool | None:
    """None where the filesystem does not tell."""
    byte = bytearray(1)
    for number in range(_SAMPLES + 1):
        at = offset + (n_bytes - 1) * number // _SAMPLES
        try:
            if not os.preadv(file, [byte], at, os.RWF_NOWAIT):
                return False
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return None
    return True


def _bring(file: int, offset: int, n_bytes: int) -> None:
    os.posix_fadvise(file, offset, n_bytes, os.POSIX_FADV_SEQUENTIAL)
    piece = bytearray(_PIECE_BYTES)
    end = offset + n_bytes
    while offset < end:
        got = os.preadv(file, [memoryview(piece)[: end - offset]], offset)
        if not got:
            return
        offset += got
