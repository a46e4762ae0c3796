# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of pools and sets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ioshape._core.context import Context
from ioshape._core.structs import said
from ioshape._native import ffi, lib
from ioshape._slots.slots import failure_of, pool_name_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ioshape._slots.local_pools import LocalPools
    from ioshape._slots.redis_pools import RedisPools

#: pools in one look: any user of a host can make more
MOST_POOLS = 128
#: holders, and waiters, in a status
MOST_LISTED = 256
#: of them at the same time
_AT_A_TIME = 16
#: of a job, of which 100 is usual
MOST_SHARE = 1_000_000
#: of a job or user
MOST_NAME_BYTES = 63


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


def where_is(context: Context, pool: str | None = None) -> Any:
    """Return where a context keeps a pool (None: all pools): a struct slots_coordinator."""
    found = ffi.new("struct slots_coordinator *")
    name = ffi.NULL if pool is None else ffi.new("char[]", pool.encode())
    if lib.save_find_coordinator(context.pointer, name, found):
        raise failure_of(pool or "", "status")
    return found


def word(text: bytes) -> str:
    """Return a text that others chose, without what could mislead a terminal."""
    return "".join(c if " " <= c <= "~" else "?" for c in text.decode("latin-1"))


class Operator:
    """Asks a coordinator about its pools, and sets them."""

    def __init__(self, coordinator: str | None = None) -> None:
        """The coordinator of the settings, or another one.

        Raises:
            ImportError: It is a Redis, and the package redis is not installed.
        """
        self._context = Context(coordinator=coordinator)
        self._pools: LocalPools | RedisPools
        if said(where_is(self._context).id) == "local":
            from ioshape._slots.local_pools import LocalPools  # noqa: PLC0415

            self._pools = LocalPools(self._context)
        else:
            from ioshape._slots.redis_pools import RedisPools  # noqa: PLC0415

            self._pools = RedisPools(self._context)

    def names(self) -> list[str]:
        """All pools that it knows."""
        return sorted(set(self._pools.names()))

    def name_for(self, path: str) -> str:
        """The pool of a path."""
        return pool_name_in(self._context, path)

    def status(self, pool: str) -> PoolStatus:
        """A pool at this moment."""
        return self._pools.status(pool)

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
        of_pool = {
            "capacity": capacity,
            "pool_bytes_per_s": pool_bytes_per_s,
            "job_bytes_per_s": job_bytes_per_s,
            "small_bytes": small_bytes,
            "express": express,
        }
        name, others = job or user, {**of_pool, "job_bytes_per_s": 0}
        if (name and any(others.values())) or (share and not name) or (job and user):
            raise ValueError(
                "these settings do not go together; name one job or one user for share and "
                "job_bytes_per_s, none for what the whole pool allows"
            )
        if not 0 <= share <= MOST_SHARE or min(of_pool.values()) < 0:
            raise ValueError("a setting of a pool is negative or too large")
        if len(name.encode()) > MOST_NAME_BYTES:
            raise ValueError(f'"{name[:80]}" is too long for the name of a job or user')
        if name:
            kind = "job" if job else "user"
            self._pools.limit(pool, kind, name, share, job_bytes_per_s, clear=clear)
        else:
            self._pools.set(pool, of_pool, clear=clear)

    def kick(self, pool: str, member: str) -> None:
        """Takes its slot, or its place in the queue, from who has this id."""
        self._pools.kick(pool, member)
