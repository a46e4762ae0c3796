# SPDX-License-Identifier: Apache-2.0
"""Read the pools of one host from their files, which libioshape/slots/local.h describes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from ioshape._core.descriptors import open_file
from ioshape._core.errors import failure
from ioshape._core.structs import said, shared_fields
from ioshape._native import ffi, lib
from ioshape._slots.pools import MOST_LISTED, Member, PoolStatus, where_is, word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ioshape._core.context import Context

# Bounds against other users, who may fill the folder and lock any bytes of a file.
_MOST_ENTRIES = 100_000
_MOST_FINDS = 4096
_MOST_SLOTS = 1000
_KEPT_S = 24 * 3600

_MAGIC = b"ioslots\0"
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class LocalPools:
    """The pools that the processes of this host share without a server."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def names(self) -> list[str]:
        """Return the names of the pools that have files."""
        where = where_is(self._context)
        folder, end = said(where.folder), f".v{where.version}.slots"
        try:
            with os.scandir(folder) as entries:
                files = [
                    one.name
                    for one in islice(entries, _MOST_ENTRIES)
                    if one.name.startswith("ioshape-") and one.name.endswith(end)
                ]
        except OSError as error:
            raise failure(
                lib.IOSHAPE_E_COORDINATOR,
                f'cannot read the folder "{folder}", where the pools of this host are: '
                f"{error.strerror}",
                folder,
                "pools",
            ) from error
        return [name for file in files if (name := self._name_in(folder, file))]

    def _name_in(self, folder: str, file: str) -> str:
        """Return the name of the pool of a file; "" if the file is invalid or unused."""
        try:
            with _opened(f"{folder}/{file}") as descriptor:
                name = word(ffi.string(_head(descriptor, where_is(self._context)).pool))
            if said(where_is(self._context, name).file) != file:
                return ""
            return "" if _is_left_behind(f"{folder}/{file}") else name
        except (OSError, ValueError):
            return ""

    def status(self, pool: str) -> PoolStatus:
        """Return the state of a pool. A pool without a file is idle."""
        where = where_is(self._context, pool)
        path = f"{said(where.folder)}/{said(where.file)}"
        try:
            with _opened(path) as file:
                return _status(pool, where, file)
        except FileNotFoundError:
            return _status(pool, where, None)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise failure(
                lib.IOSHAPE_E_COORDINATOR,
                f'cannot read the pool\'s file "{path}": {why}',
                pool,
                "status",
            ) from error

    def set(self, pool: str, settings: Mapping[str, int], *, clear: bool) -> None:
        """Refuse: the settings of the jobs decide how many of them may write."""
        assert settings or clear
        _refuse(pool, "set", 'use a Redis, or set "slots" for each job (IOSHAPE_SLOTS)')

    def limit(self, pool: str, kind: str, name: str, share: int, rate: int, *, clear: bool) -> None:
        """Refuse: the processes of a host are served first come, first served."""
        assert kind or name or share or rate or clear
        _refuse(pool, "set", "use a Redis as coordinator, also on one host")

    def kick(self, pool: str, member: str) -> None:
        """Refuse: the kernel holds a slot for its process, so only the process can release it."""
        assert member
        _refuse(
            pool, "kick", "end the process that holds the slot; the pool's status has its number"
        )


def _refuse(pool: str, operation: str, remedy: str) -> NoReturn:
    why = f'an operator cannot change pool "{pool}", which the processes of this host share'
    raise failure(-errno.ENOTSUP, why, pool, operation, remedy=remedy)


# ---- The file of a pool -------------------------------------------------------------------------


@contextmanager
def _opened(path: str, access: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file that another user may have created."""
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    file = open_file(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("it is not a regular file")
        yield file
    finally:
        os.close(file)


def _is_left_behind(path: str) -> bool:
    """Remove the file of a pool that no process has used for a day; return whether it did."""
    try:
        with _opened(path, os.O_RDWR) as file:
            found = os.fstat(file)
            if found.st_uid != os.geteuid() or found.st_mtime > time.time() - _KEPT_S:
                return False
            # Each process that uses the pool holds a lock on its file. Then locking all of it
            # fails.
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(0, 0))
            os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    return True


def _lock(start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


def _read(file: int, kind: str, offset: int) -> Any:
    """Read a struct from a file. Bytes beyond the end of the file read as zeros."""
    found = ffi.new(f"struct {kind} *")
    data = os.pread(file, ffi.sizeof(found[0]), offset)
    ffi.memmove(found, data, len(data))
    return found


def _head(file: int, where: Any) -> Any:
    head = _read(file, "slots_file_head", 0)
    if bytes(ffi.buffer(head.magic)) != _MAGIC or head.version != where.version:
        raise ValueError("it is damaged; the next process that uses the pool repairs it")
    return head


def _locked(file: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that requests have locked, in order."""
    finds, at = 0, begin
    while at < end:
        first, limit = None, end
        while at < limit and finds < _MOST_FINDS:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock(at, limit - at))
            kind, _, start, length, _ = struct.unpack(_FLOCK, answer)
            finds += 1
            if kind == fcntl.F_UNLCK:
                break
            # F_OFD_GETLK reports any lock in the range, so look again in front of the one it
            # reported.
            limit = max(start, at)
            first = limit, min(start + length, end) if length else end
        if first is None:
            return
        yield first
        at = first[1]


def _status(pool: str, where: Any, file: int | None) -> PoolStatus:
    capacity, by_job, used = 0, False, 0
    holders: list[Member] = []
    waiters: list[Member] = []
    if file is not None:
        head = _head(file, where)
        capacity, by_job = head.capacity, bool(head.by_job)
        slots = where.locks[lib.LOCAL_HOLDER_LINE]
        for begin, end in _locked(file, slots, slots + where.holders):
            for number in range(begin - slots, end - slots):
                record = _record(file, number)
                used += bool(record.id[0] != b"\0" and number)
                if record.first == number and record.id[0] != b"\0":
                    holders.append(_member(record, number))
        waiters = list(_waiters(file, where))
    return PoolStatus(
        pool=pool,
        coordinator="local",
        capacity=min(capacity or where.default_capacity, _MOST_SLOTS),
        capacity_by="job" if by_job else "default",
        used=used,
        pool_bytes_per_s=0,
        job_bytes_per_s=0,
        small_bytes=where.small_bytes,
        bypass=where.bypass,
        grants=0,
        holders=tuple(sorted(holders, key=lambda one: one.fence)[:MOST_LISTED]),
        waiters=tuple(waiters[:MOST_LISTED]),
        holder_count=len(holders),
        waiter_count=len(waiters),
    )


def _waiters(file: int, where: Any) -> Iterator[Member]:
    for line in (lib.LOCAL_URGENT_LINE, lib.LOCAL_LINE):
        tickets = where.locks[line]
        # A request locks one byte, whose offset is the number of its ticket.
        for begin, _ in _locked(file, tickets, where.locks[line + 1]):
            ring = where.holders + (line == lib.LOCAL_LINE) * lib.LOCAL_WAITERS
            record = _record(file, ring + (begin - tickets) % lib.LOCAL_WAITERS)
            if record.id[0] != b"\0":
                yield _member(record)


def _record(file: int, number: int) -> Any:
    size = ffi.sizeof("struct slots_file_record")
    return _read(file, "slots_file_record", lib.LOCAL_HEAD_BYTES + number * size)


def _member(record: Any, holder: int | None = None) -> Member:
    """Return the request that a record describes; `holder` is the number of its slot."""
    now = time.monotonic_ns()
    told: dict[str, Any] = {
        "bypass": holder == 0,
        "passed": 0 if holder is None else record.passed,
        "fence": 0 if holder is None else record.number,
        "since_s": max(now - record.since_ns, 0) / 1e9,
        "lease_s": max(record.until_ns - now, 0) / 1e9,
    }
    flags = frozenset({"urgent"})
    shared = shared_fields(Member, record, flags=flags, text=lambda text: word(ffi.string(text)))
    return Member(**{**shared, **told})
