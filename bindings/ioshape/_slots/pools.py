# SPDX-License-Identifier: Apache-2.0
"""Show pools to operators, and change their settings: the status, limits and kicks.

Operator calls the coordinator's implementation: `local_pools.py` or `redis_pools.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ioshape._core.context import Context
from ioshape._core.structs import said
from ioshape._native import ffi, lib
from ioshape._slots.slots import failure_of, pool_name_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ioshape._slots.local_pools import LocalPools
    from ioshape._slots.redis_pools import RedisPools

#: the most pools in one survey: any user of a host can create more
MOST_POOLS = 128
#: the most holders, and the most waiters, in a status
MOST_LISTED = 256
#: pools whose status is read at the same time
_AT_A_TIME = 16
#: the highest share of a job; 100 is usual
MOST_SHARE = 1_000_000
#: bytes of a job's or user's name at most
MOST_NAME_BYTES = 63


@dataclass(frozen=True)
class Member:
    """A request that holds a slot, or waits for one."""

    id: str
    job: str
    node: str
    rank: int
    weight: int
    bypass: bool
    #: whether it has a deadline
    urgent: bool
    #: bytes that it announced; 0 if unknown
    bytes: int
    #: bytes that it has written, as of its last heartbeat
    passed: int
    #: number of its grant, for holders; 0 for waiters
    fence: int
    #: seconds for which it has held the slot, or waited
    since_s: float
    #: seconds until the request counts as dead, unless a heartbeat arrives
    lease_s: float
    #: its process id, as that process sees it; 0 with a Redis
    pid: int = 0


@dataclass(frozen=True)
class PoolJob:
    """The use that a job made of a pool."""

    job: str
    #: user of the job's latest request, as the job says
    user: str
    #: bytes since the pool was created, or since the job was last forgotten
    written_bytes: int
    #: number of slots that the job had
    writes: int
    #: seconds for which it held slots, added up; only with a Redis
    held_s: float = 0
    #: seconds for which it waited for slots, added up; only with a Redis
    waited_s: float = 0
    #: number of saves whose content looked wrong, by rule (setting "examine"); only with a Redis
    alarms: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolLimit:
    """The limits that an operator set for one job or one user."""

    #: name of the job; "" for a limit of a user
    job: str
    #: name of the user; "" for a limit of a job
    user: str
    #: share that replaces the job's own, which is usually 100; 0: the job's own
    share: int
    #: bytes per second for the job, or for all jobs of the user together; 0: no limit
    bytes_per_s: int


@dataclass(frozen=True)
class PoolStatus:
    """The state of a pool at one moment."""

    pool: str
    coordinator: str
    capacity: int
    #: source of the capacity: "operator", "job" or "default"
    capacity_by: str
    #: slots that are held, counted by weight
    used: int
    #: limit that an operator set, in bytes per second; 0: no limit
    pool_bytes_per_s: int
    #: limit that an operator set for each job, in bytes per second; 0: no limit
    job_bytes_per_s: int
    #: size in bytes up to which a save may pass the queue
    small_bytes: int
    #: number of small saves that may pass the queue at a time
    bypass: int
    #: number of grants since the pool was created
    grants: int
    #: holders, oldest first; incomplete if there are many
    holders: tuple[Member, ...]
    #: waiters, the next one first; incomplete if there are many
    waiters: tuple[Member, ...]
    #: number of all holders
    holder_count: int
    #: number of all waiters
    waiter_count: int
    #: the jobs that wrote most; at most 64
    jobs: tuple[PoolJob, ...] = ()
    #: limits of jobs and users
    limits: tuple[PoolLimit, ...] = ()
    #: bytes written since the pool was created; this and the next two only with a Redis
    written_bytes: int = 0
    #: seconds for which slots were held since then, added up
    held_s: float = 0
    #: seconds of waiting since then, added up
    waited_s: float = 0
    #: time of the operator's last change, in seconds since 1970; 0: never
    changed_s: float = 0


@dataclass(frozen=True)
class PoolFailure:
    """A pool whose status could not be read."""

    pool: str
    #: the library's error message
    error: str


@dataclass(frozen=True)
class PoolsLook:
    """The state of several pools at one moment."""

    pools: tuple[PoolStatus, ...]
    #: pools that the coordinator could not show, although it answers
    failed: tuple[PoolFailure, ...] = ()
    #: number of pools beyond the first `MOST_POOLS`
    left_out: int = 0


def where_is(context: Context, pool: str | None = None) -> Any:
    """Return where a context keeps a pool (None: all pools), as a struct slots_coordinator."""
    found = ffi.new("struct slots_coordinator *")
    name = ffi.NULL if pool is None else ffi.new("char[]", pool.encode())
    if lib.save_find_coordinator(context.pointer, name, found):
        raise failure_of(pool or "", "status")
    return found


def word(text: bytes) -> str:
    """Return a text from an untrusted source without characters that could mislead a terminal."""
    return "".join(c if " " <= c <= "~" else "?" for c in text.decode("latin-1"))


class Operator:
    """A client for operators, which reads and changes the pools of a coordinator."""

    def __init__(self, coordinator: str | None = None) -> None:
        """Use the coordinator of the settings, or another one.

        Raises:
            ImportError: The coordinator is a Redis, and the package redis is not installed.
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
        """Return the names of all pools that the coordinator knows, sorted."""
        return sorted(set(self._pools.names()))

    def name_for(self, path: str) -> str:
        """Return the name of the pool that saves to a path use."""
        return pool_name_in(self._context, path)

    def status(self, pool: str) -> PoolStatus:
        """Return the state of a pool at this moment."""
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
        bypass: int = 0,
        clear: bool = False,
        job: str = "",
        user: str = "",
        share: int = 0,
    ) -> None:
        """Change the settings that are not 0; with `clear`, first remove all settings.

        With a job or a user, only `share` and `job_bytes_per_s` of that job or user can be set.

        Raises:
            ValueError: The settings do not go together, or one is out of range.
        """
        of_pool = {
            "capacity": capacity,
            "pool_bytes_per_s": pool_bytes_per_s,
            "job_bytes_per_s": job_bytes_per_s,
            "small_bytes": small_bytes,
            "bypass": bypass,
        }
        name, others = job or user, {**of_pool, "job_bytes_per_s": 0}
        if (name and any(others.values())) or (share and not name) or (job and user):
            raise ValueError(
                "these settings cannot be combined; name one job or one user for share and "
                "job_bytes_per_s, none for limits of the whole pool"
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
        """Take the slot, or the position in the queue, from the request with this id."""
        self._pools.kick(pool, member)
