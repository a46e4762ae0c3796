# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of pools and sets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ioshape._c import said, shared_fields, sized
from ioshape._native import ffi, lib
from ioshape._settings.context import Context
from ioshape._slots.slots import failure_of, pool_name_in

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = TypeVar("Row")

#: pools in one look: any user of a host can make more
MOST_POOLS = 128
#: of them at the same time: a pool that another process keeps locked takes a second
_AT_A_TIME = 16


@dataclass(frozen=True)
class Member:
    """One that holds a slot, or waits for one."""

    id: str
    job: str
    node: str
    rank: int
    weight: int
    express: bool
    #: it has a deadline
    urgent: bool
    #: it said it would write; 0 if unknown
    bytes: int
    #: bytes, as of its last heartbeat
    passed: int
    #: of those that hold
    fence: int
    #: held, or waited
    since_s: float
    #: until it is taken for dead, unless a heartbeat comes
    lease_s: float
    #: of its process, as that process sees it; 0 with a Redis
    pid: int = 0


@dataclass(frozen=True)
class PoolJob:
    """What a job wrote in slots of a pool."""

    job: str
    #: of its latest request, as the job says
    user: str
    #: since the pool began, or the job was forgotten
    written_bytes: int
    #: slots that it had
    writes: int
    #: that it had them, together; with a Redis
    held_s: float = 0
    #: that it waited for them, together; with a Redis
    waited_s: float = 0


@dataclass(frozen=True)
class PoolLimit:
    """What an operator allows one job, or one user."""

    #: "": it is a user's
    job: str
    #: "": it is a job's
    user: str
    #: instead of the job's own, of which 100 is usual; 0: its own
    share: int
    #: of the job, or of all jobs of the user together; 0: any
    bytes_per_s: int


@dataclass(frozen=True)
class PoolStatus:
    """A pool at one moment."""

    pool: str
    coordinator: str
    capacity: int
    #: "operator", "job" or "default"
    capacity_by: str
    #: slots, by weight
    used: int
    #: bytes per second that the operator allows; 0: any
    pool_bytes_per_s: int
    #: the same for each job
    job_bytes_per_s: int
    #: up to here a save may be let past the queue
    small_bytes: int
    #: so many of them at a time
    express: int
    #: since the pool began
    grants: int
    #: in the last 60 s, to within those of the minute before
    grants_last_minute: int
    #: oldest first; not all if there are many
    holders: tuple[Member, ...]
    #: the next one first; not all if there are many
    waiters: tuple[Member, ...]
    #: all of them
    holder_count: int
    #: all of them
    waiter_count: int
    #: those that wrote most; at most 64
    jobs: tuple[PoolJob, ...] = ()
    #: for one job or user
    limits: tuple[PoolLimit, ...] = ()
    #: since it began; these three with a Redis
    written_bytes: int = 0
    #: that slots were held since then, together
    held_s: float = 0
    #: the same for waiting
    waited_s: float = 0
    #: when an operator last set something, in seconds since 1970; 0: never
    changed_s: float = 0


@dataclass(frozen=True)
class PoolFailure:
    """A pool that cannot be shown."""

    pool: str
    #: the library's sentence
    error: str


@dataclass(frozen=True)
class PoolsLook:
    """Pools at one moment."""

    pools: tuple[PoolStatus, ...]
    #: the coordinator answers, but not for these
    failed: tuple[PoolFailure, ...] = ()
    #: pools beyond the first `MOST_POOLS`
    left_out: int = 0


def _members(array: Any, count: int) -> tuple[Member, ...]:
    return tuple(
        Member(**shared_fields(Member, one), bytes=one.expected_bytes, passed=one.written_bytes)
        for one in (array[i] for i in range(count))
    )


def _rows(kind: type[Row], array: Any, count: int) -> tuple[Row, ...]:
    return tuple(kind(**shared_fields(kind, array[i])) for i in range(count))


class Operator:
    """Asks a coordinator about its pools, and sets them."""

    def __init__(self, coordinator: str | None = None) -> None:
        """The coordinator of the settings, or another one."""
        self._context = Context(coordinator=coordinator)

    def names(self) -> list[str]:
        """All pools that it knows."""
        out = ffi.new("char **")
        self._check(lib.ioshape_pool_list(self._context.pointer, out), "", "pools")
        names = ffi.gc(out[0], lib.ioshape_free)
        return sorted({name for name in said(names).split("\n") if name})

    def name_for(self, path: str) -> str:
        """The pool of a path."""
        return pool_name_in(self._context, path)

    def status(self, pool: str) -> PoolStatus:
        """A pool at this moment."""
        out = ffi.new("struct ioshape_pool_status **")
        code = lib.ioshape_pool_get_status(self._context.pointer, pool.encode(), out)
        self._check(code, pool, "status")
        status = ffi.gc(out[0], lib.ioshape_pool_status_free)
        return PoolStatus(
            **shared_fields(PoolStatus, status),
            holders=_members(status.holders, status.holder_listed),
            waiters=_members(status.waiters, status.waiter_listed),
            jobs=_rows(PoolJob, status.jobs, status.job_listed),
            limits=_rows(PoolLimit, status.limits, status.limit_listed),
        )

    def look(self, wanted: Sequence[str] = ()) -> PoolsLook:
        """Return the status of these pools, or of the first `MOST_POOLS` by name.

        Raises:
            CoordinatorError: The coordinator does not answer.
        """
        known = self.names()
        names = wanted or known[:MOST_POOLS]
        pools: list[PoolStatus] = []
        failed: list[PoolFailure] = []
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            asked = [threads.submit(self.status, name) for name in names]
        for name, answer in zip(names, asked, strict=True):
            try:
                pools.append(answer.result())
            except OSError as error:
                failed.append(PoolFailure(name, str(error)))
        left_out = 0 if wanted else len(known) - len(names)
        return PoolsLook(tuple(pools), tuple(failed), left_out)

    def set(
        self,
        pool: str,
        *,
        capacity: int = 0,
        pool_bytes_per_s: int = 0,
        job_bytes_per_s: int = 0,
        small_bytes: int = 0,
        express: int = 0,
        clear: bool = False,
        job: str = "",
        user: str = "",
        share: int = 0,
    ) -> None:
        """Sets what is not 0; `clear` first forgets all that was set.

        With a job or a user only what that one may: its share, and `job_bytes_per_s`.
        """
        settings = sized("ioshape_pool_settings")
        settings.capacity = capacity
        settings.pool_bytes_per_s = pool_bytes_per_s
        settings.job_bytes_per_s = job_bytes_per_s
        settings.small_bytes = small_bytes
        settings.express = express
        settings.clear = clear
        settings.share = share
        names = [ffi.new("char[]", name.encode()) if name else ffi.NULL for name in (job, user)]
        settings.job, settings.user = names
        code = lib.ioshape_pool_set(self._context.pointer, pool.encode(), settings)
        self._check(code, pool, "set")

    def kick(self, pool: str, member: str) -> None:
        """Takes its slot, or its place in the queue, from who has this id."""
        code = lib.ioshape_pool_kick(self._context.pointer, pool.encode(), member.encode())
        self._check(code, member, "kick")

    def _check(self, code: int, subject: str, operation: str) -> None:
        if code:
            raise failure_of(subject, operation)
