# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of pools and sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ioshape._c import said, shared_fields, sized
from ioshape._native import ffi, lib
from ioshape._settings.context import Context
from ioshape._slots.slots import failure_of, pool_name_in


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


@dataclass(frozen=True)
class PoolAct:
    """What an operator did."""

    #: seconds since 1970, by the coordinator's clock
    at_s: float
    #: USER@HOST, as the operator's process says
    who: str
    #: such as "set capacity=8 (was 4)" or "kick ID"
    what: str


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
    #: the latest 8, oldest first
    acts: tuple[PoolAct, ...] = ()


def _members(array: Any, count: int) -> tuple[Member, ...]:
    return tuple(
        Member(**shared_fields(Member, one), bytes=one.expected_bytes, passed=one.written_bytes)
        for one in (array[i] for i in range(count))
    )


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
            jobs=tuple(
                PoolJob(**shared_fields(PoolJob, status.jobs[i])) for i in range(status.job_listed)
            ),
            acts=tuple(
                PoolAct(**shared_fields(PoolAct, status.acts[i])) for i in range(status.act_listed)
            ),
        )

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
    ) -> None:
        """Sets what is not 0; `clear` first forgets all that was set."""
        settings = sized("ioshape_pool_settings")
        settings.capacity = capacity
        settings.pool_bytes_per_s = pool_bytes_per_s
        settings.job_bytes_per_s = job_bytes_per_s
        settings.small_bytes = small_bytes
        settings.express = express
        settings.clear = clear
        code = lib.ioshape_pool_set(self._context.pointer, pool.encode(), settings)
        self._check(code, pool, "set")

    def kick(self, pool: str, member: str) -> None:
        """Takes its slot, or its place in the queue, from who has this id."""
        code = lib.ioshape_pool_kick(self._context.pointer, pool.encode(), member.encode())
        self._check(code, member, "kick")

    def _check(self, code: int, subject: str, operation: str) -> None:
        if code:
            raise failure_of(subject, operation)
