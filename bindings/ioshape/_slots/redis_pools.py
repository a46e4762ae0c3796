# SPDX-License-Identifier: Apache-2.0
"""Read and change the pools of a Redis, by calls of slots.lua through the package redis."""

from __future__ import annotations

import errno
import logging
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        ConnectionError,  # noqa: A004 - its name
        MovedError,
        NoPermissionError,
        NoScriptError,
        RedisError,
        ResponseError,
        TimeoutError,  # noqa: A004 - its name
    )
    from redis.retry import Retry
except ImportError as missing:
    raise ImportError(
        "the coordinator is a Redis, and the package redis is not installed; install it: "
        "pip install 'ioshape[redis]'"
    ) from missing

from ioshape._core.errors import failure
from ioshape._core.report import ALARMS
from ioshape._core.structs import said
from ioshape._core.text import one_line
from ioshape._native import ffi, lib
from ioshape._slots.pools import MOST_LISTED, Member, PoolJob, PoolLimit, PoolStatus, where_is, word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ioshape._core.context import Context

    Node = tuple[str, int]

# Seconds, as in C: for a call, and at least for each of several hosts that do not answer.
_MOST_WAIT_S = 2.0
_LEAST_TIMEOUT_S = 0.5
_MOST_REDIRECTS = 5
# Lua numbers above 2^53 are not exact integers.
_MOST_BYTES = 2**53
_MOST_JOBS = 64
_KEYS_AT_A_TIME = 1000  # that the server looks at in one call
_HOLDING = 2  # the state of a member that holds a slot

#: The settings of a pool, by their names in slots.lua.
_NAMES = {
    "capacity": "capacity",
    "pool_bytes_per_s": "pool_rate",
    "job_bytes_per_s": "job_rate",
    "small_bytes": "small",
    "bypass": "express",
}

# Parts of the script's error messages if another program has written to the keys of the pool.
_UNREADABLE = (
    "WRONGTYPE",
    "attempt to ",
    "Bad data format",
    "Missing bytes in input",
    "bad argument #",
)

_SHA1 = said(lib.slots_script_sha1)
_SCRIPT = bytes(ffi.string(lib.slots_script))


class RedisPools:
    """The pools of a Redis, of a Redis Cluster, or of a service that Redis Sentinel manages."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._clients: dict[tuple[str | Node, str], Any] = {}

    def names(self) -> list[str]:
        """Return the names of the pools with settings, and of those used in the last day."""
        where = where_is(self._context)
        suffix = said(where.key).removeprefix("{ios:")[:-1]  # of all pools: where names none
        with self._refusals("pools", where):
            keys = list(self._keys(where, f"{{ios:*{suffix}[mo]"))
        return [word(key).removeprefix("{ios:")[: -len(suffix) - 1] for key in keys]

    def status(self, pool: str) -> PoolStatus:
        """Return the state of a pool."""
        where = where_is(self._context, pool)
        answer = self._call(pool, where, "status", "")
        try:
            return _status(pool, where, _named(answer))
        except (KeyError, TypeError, ValueError) as error:
            raise failure(
                lib.IOSHAPE_E_COORDINATOR,
                f'the coordinator\'s answer to "status" for pool {pool} cannot be understood',
                pool,
                "status",
                remedy="check that it is a Redis, and that all jobs use this version of ioshape",
            ) from error

    def set(self, pool: str, settings: Mapping[str, int], *, clear: bool) -> None:
        """Change the settings of a pool."""
        named = {_NAMES[name]: min(value, _MOST_BYTES) for name, value in settings.items()}
        self._change(pool, named, clear=clear)

    def limit(self, pool: str, kind: str, name: str, share: int, rate: int, *, clear: bool) -> None:
        """Change the limits of one job or one user."""
        of_one = {"share": share, "rate": min(rate, _MOST_BYTES)}
        named = {f"{kind}:{name}:{what}": value for what, value in of_one.items()}
        self._change(pool, named, clear=clear)

    def _change(self, pool: str, named: Mapping[str, int], *, clear: bool) -> None:
        """Set the values that are not 0, and with `clear` remove the others."""
        where = where_is(self._context, pool)
        changes = {name: value for name, value in named.items() if value or clear}
        if not self._call(pool, where, "set", "", *chain.from_iterable(changes.items())):
            raise failure(
                -errno.ENOSPC,
                f"pool {pool} already has limits for the most jobs and users that it can",
                pool,
                "set",
                remedy="clear one that is not needed",
            )

    def kick(self, pool: str, member: str) -> None:
        """Take a slot, or a position in the queue, from a request."""
        if not self._call(pool, where_is(self._context, pool), "release", member):
            why = f"no request holds or waits for a slot of pool {pool} as {one_line(member)}"
            raise failure(-errno.ENOENT, why, pool, "kick", remedy="the pool's status has the ids")

    # ---- Calls to the server --------------------------------------------------------------------

    def _keys(self, where: Any, pattern: str) -> Iterator[bytes]:
        """Yield the keys that match a pattern, of all masters if the server is in a cluster."""
        sends = [partial(self._send, where)]
        try:
            ranges = self._send(where, "CLUSTER", "SLOTS")
        except NoPermissionError:
            raise
        except ResponseError:
            pass  # the server is in no cluster
        else:
            # A node that does not know its own address reports none.
            home = said(where.address.nodes[0].host)
            masters = {(word(master[0] or b"") or home, master[1]) for _, _, master, *_ in ranges}
            sends = [partial(self._follow, where, node) for node in masters]
        for send in sends:
            cursor = None
            while cursor != 0:
                words = ("SCAN", cursor or 0, "MATCH", pattern, "COUNT", _KEYS_AT_A_TIME)
                cursor, keys = send(*words)
                yield from keys

    def _call(self, pool: str, where: Any, operation: str, subject: str, *more: Any) -> Any:
        """Call the script that manages a pool; delete keys that it cannot read, and try again."""
        data = said(where.key)
        settings = data[:-1] + "o"
        words = (1, data, operation, subject, where.lease_ms, 0, *more)
        with self._refusals(operation, where, pool):
            for key in (data, settings):
                try:
                    return self._evaluate(where, words)
                except ResponseError as error:
                    if any(text in str(error) for text in _UNREADABLE):
                        self._send(where, "DEL", key)
                        logging.getLogger("ioshape").warning(
                            'pool "%s" had unreadable keys (%s); it was reset, and '
                            "keeps the readable settings of operators",
                            pool,
                            one_line(str(error)),
                        )
                    elif "IOSHAPE-ANEW" not in str(error):
                        raise
            return self._evaluate(where, words)

    def _evaluate(self, where: Any, words: tuple[Any, ...]) -> Any:
        try:
            return self._send(where, "EVALSHA", _SHA1, *words)
        except NoScriptError:
            return self._send(where, "EVAL", _SCRIPT, *words)

    def _send(self, where: Any, *command: Any) -> Any:
        """Send a command to the first host of the address that answers."""
        address = where.address
        if address.kind == lib.ADDRESS_UNIX:
            return self._client(where, said(address.path)).execute_command(*command)
        nodes = [(said(node.host), node.port) for node in address.nodes[0 : address.node_count]]
        for node in nodes:
            try:
                if address.kind == lib.ADDRESS_SENTINEL:
                    return self._follow(where, self._master(where, node), *command)
                return self._follow(where, node, *command)
            except (ConnectionError, TimeoutError):
                if node == nodes[-1]:
                    raise
        raise AssertionError

    def _follow(self, where: Any, node: Node, *command: Any) -> Any:
        """Send a command to a node of a cluster, and follow its redirects."""
        for _ in range(_MOST_REDIRECTS):
            try:
                return self._client(where, node).execute_command(*command)
            except MovedError as error:
                node = (error.host or node[0], error.port)
        raise ConnectionError("the nodes of the cluster redirect to each other endlessly")

    def _master(self, where: Any, sentinel: Node) -> Node:
        service = said(where.address.service)
        words = ("SENTINEL", "get-master-addr-by-name", service)
        try:
            found = self._client(where, sentinel, greet=False).execute_command(*words)
        except AuthenticationError:
            found = self._client(where, sentinel).execute_command(*words)
        if found is None:
            raise ConnectionError(f"the sentinel knows no service {service}")
        return word(found[0]), int(found[1])

    def _client(self, where: Any, server: str | Node, *, greet: bool = True) -> Any:
        """Return the client of a server; it keeps connections, which threads share."""
        address = where.address
        password = said(address.password) if greet and address.has_password else ""
        if (server, password) not in self._clients:
            options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
            timeout_s = max(_MOST_WAIT_S / max(address.node_count, 1), _LEAST_TIMEOUT_S)
            options["socket_timeout"] = options["socket_connect_timeout"] = timeout_s
            if greet:
                options["db"] = address.database
            if password:
                options["password"] = password
                options["username"] = said(address.user) or None
            if isinstance(server, str):
                options["unix_socket_path"] = server
            else:
                options["host"], options["port"] = server
                if address.tls:
                    options.update(ssl=True, ssl_cert_reqs="required", ssl_check_hostname=True)
            self._clients[server, password] = redis.Redis(**options)
        return self._clients[server, password]

    @contextmanager
    def _refusals(self, operation: str, where: Any, pool: str = "") -> Iterator[None]:
        """Turn exceptions of redis into the library's, whose messages contain no password."""
        try:
            yield
        except (RedisError, OSError) as error:
            address = where.address
            nodes = address.nodes[0 : address.node_count]
            hosts = ",".join(f"{said(node.host)}:{node.port}" for node in nodes)
            raise failure(
                lib.IOSHAPE_E_COORDINATOR,
                f"redis at {said(address.path) or hosts} cannot be reached: {one_line(str(error))}",
                pool,
                operation,
                remedy=_remedy(error),
            ) from None


def _remedy(error: Exception) -> str:
    if isinstance(error, NoPermissionError):
        return "give its user the rights in docs/coordinator/users.acl"
    if isinstance(error, AuthenticationError):
        return "give a password in the address, password_file or IOSHAPE_PASSWORD"
    if "maxmemory" in str(error):
        return "raise its maxmemory"
    if isinstance(error, ResponseError):
        return "check that it is a Redis, and that all jobs use this version of ioshape"
    return "check that it runs, and that this host may reach it"


# ---- Answers of the script ----------------------------------------------------------------------


def _named(answer: list[Any]) -> dict[str, Any]:
    """Return a list of alternating names and values as a dictionary."""
    return dict(zip(map(word, answer[::2]), answer[1::2], strict=True))


def _number(value: int | bytes) -> int:
    """Return a number; Lua writes numbers above 2^53 as text."""
    return max(0, int(float(value)))


def _seconds(value: int | bytes) -> float:
    return _number(value) / 1000


def _member(row: dict[str, Any], now: int) -> Member:
    return Member(
        id=word(row["id"]),
        job=word(row["job"]),
        node=word(row["node"]),
        rank=_number(row["rank"]),
        weight=_number(row["weight"]),
        bypass=_number(row["state"]) == _HOLDING and not _number(row["given"]),
        urgent=bool(_number(row["is_urgent"])),
        bytes=_number(row["bytes"]),
        passed=_number(row["passed"]),
        fence=_number(row["fence"]),
        since_s=max(now - _number(row["since"]), 0) / 1000,
        lease_s=max(_number(row["until"]) - now, 0) / 1000,
    )


def _job(row: dict[str, Any]) -> PoolJob:
    return PoolJob(
        job=word(row["job"]),
        user=word(row["user"]),
        written_bytes=_number(row["written"]),
        writes=_number(row["writes"]),
        held_s=_seconds(row["held"]),
        waited_s=_seconds(row["waited"]),
        alarms={rule: _number(row[rule]) for rule in ALARMS.values()},
    )


def _limits(settings: dict[str, Any]) -> list[PoolLimit]:
    """Return the settings of jobs and users, whose keys are `job:NAME:share`, `user:NAME:rate`."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for setting, value in settings.items():
        kind, _, rest = setting.partition(":")
        name, _, what = rest.rpartition(":")
        if kind in ("job", "user") and what in ("share", "rate"):
            found.setdefault((kind, name), {})[what] = _set(value)
    limits = [
        PoolLimit(
            job=name if kind == "job" else "",
            user=name if kind == "user" else "",
            share=of_one.get("share", 0),
            bytes_per_s=of_one.get("rate", 0),
        )
        for (kind, name), of_one in found.items()
    ]
    return sorted(limits, key=lambda one: (one.user, one.job))


def _set(value: bytes) -> int:
    """Return a setting; 0 if it is no number, because any client may have written it."""
    try:
        return _number(value)
    except (ValueError, OverflowError):
        return 0


#: The fields that the script leaves out of the status of a pool that was never used.
_UNUSED: dict[str, Any] = {"pool": [[]], "holders": [], "waiters": [], "jobs": []}


def _status(pool: str, where: Any, found: dict[str, Any]) -> PoolStatus:
    found = {**_UNUSED, **found}
    now = _number(found["now"])
    of_pool = defaultdict(int, _named(found["pool"][0]))
    settings = _named(found["set"][0])
    holders = sorted(
        (_member(_named(row), now) for row in found["holders"]), key=lambda one: one.fence
    )
    waiters = [_member(_named(row), now) for row in found["waiters"]]
    held = Counter[str]()
    for one in holders:
        held[one.job] += one.passed
    jobs = [_job(_named(row)) for row in found["jobs"]]
    jobs = [replace(one, written_bytes=one.written_bytes + held[one.job]) for one in jobs]
    in_use, by_job = _number(of_pool["capacity"]), _number(of_pool["by_job"])
    chosen = {name: _set(settings.get(name, b"0")) for name in (*_NAMES.values(), "changed")}
    return PoolStatus(
        pool=pool,
        coordinator="redis",
        capacity=chosen["capacity"] or in_use or where.default_capacity,
        capacity_by="operator" if chosen["capacity"] else "job" if by_job else "default",
        used=_number(of_pool["used"]),
        pool_bytes_per_s=chosen["pool_rate"],
        job_bytes_per_s=chosen["job_rate"],
        small_bytes=chosen["small"] or where.small_bytes,
        bypass=chosen["express"] or where.bypass,
        grants=_number(of_pool["grants"]),
        holders=tuple(holders[:MOST_LISTED]),
        waiters=tuple(waiters),
        holder_count=len(holders),
        waiter_count=_number(of_pool["waiters"]),
        jobs=tuple(sorted(jobs, key=lambda one: (-one.written_bytes, one.job))[:_MOST_JOBS]),
        limits=tuple(_limits(settings)),
        written_bytes=_number(of_pool["written"]),
        held_s=_seconds(of_pool["held"]),
        waited_s=_seconds(of_pool["waited"]),
        changed_s=chosen["changed"] / 1000,
    )
