# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape exporter": serves the state of pools, or of tiers, to Prometheus."""

from __future__ import annotations

import pwd
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from ioshape._cli.output import SentenceError, remark
from ioshape._cli.pools import (
    coordinator_option,
    operator_of,
    pool_argument,
    sentences,
)
from ioshape._core.report import ALARMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ioshape._slots.pools import Member, Operator, PoolsLook, PoolStatus

# Most jobs of a pool with their own label, because Prometheus keeps labels for ever.
_MOST_JOBS = 50
# Socket timeout, for clients that send no request or read no answer.
_TIMEOUT_S = 10


class _Metric(NamedTuple):
    """A metric of a pool, a job or a tier. `value` is the name of an attribute, or a function."""

    name: str
    about: str
    value: str | Callable[[Any], float]


def _families(
    kind: str,
    metrics: Iterable[_Metric],
    labels: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Any]],
) -> Iterable[Any]:
    """Yield metric families for Prometheus.

    `kind` is "counter" or "gauge". Each row has the values of the labels, and the object that the
    metrics describe.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    family_of = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    for name, about, value in metrics:
        family = family_of(f"ioshape_{name}", about, labels=labels)
        for values, one in rows:
            found = value(one) if callable(value) else getattr(one, value)
            family.add_metric(values, float(found))
        yield family


def _settings(pool: PoolStatus) -> int:
    """Return how many settings of the pool the operator has made, as far as the state shows."""
    return len(pool.limits) + sum(
        (
            pool.capacity_by == "operator",
            pool.pool_bytes_per_s > 0,
            pool.job_bytes_per_s > 0,
        )
    )


def _longest(members: Sequence[Member]) -> float:
    return max((one.since_s for one in members), default=0)


_OF_POOLS = (
    _Metric("pool_capacity_slots", "number of slots of the pool", "capacity"),
    _Metric("pool_used_slots", "slots in use, by weight", "used"),
    _Metric("pool_holders", "writers that hold slots", "holder_count"),
    _Metric("pool_waiters", "writers in the queue", "waiter_count"),
    _Metric(
        "pool_oldest_slot_seconds",
        "seconds for which the oldest holder has held its slot",
        lambda pool: _longest(pool.holders),
    ),
    _Metric(
        "pool_oldest_wait_seconds",
        "seconds for which the oldest writer in the queue has waited",
        lambda pool: _longest(pool.waiters),
    ),
    _Metric(
        "pool_settings", "number of settings by the operator: capacity, rates and limits", _settings
    ),
    _Metric(
        "pool_changed_timestamp_seconds",
        "time of the operator's last change; 0: never",
        "changed_s",
    ),
)

_GROWING_OF_POOLS = (
    _Metric("pool_grants", "slots granted so far", "grants"),
    _Metric("pool_written_bytes", "bytes written in slots", "written_bytes"),
    _Metric("pool_held_seconds", "total seconds for which slots were held", "held_s"),
    _Metric("pool_waited_seconds", "total seconds for which writers waited for slots", "waited_s"),
)

_GROWING_OF_JOBS = (
    _Metric("job_written_bytes", "bytes that the job wrote in its slots", "written_bytes"),
    _Metric("job_waited_seconds", "total seconds for which the job waited for slots", "waited_s"),
)

_ALARMS = _Metric(
    "job_alarms", "saves of the job whose content looked wrong, by the rule that found it", float
)

_OF_TIERS = (
    _Metric("tier_waiting", "checkpoints that wait to be drained", "waiting"),
    _Metric(
        "tier_waiting_bytes", "bytes of the checkpoints that wait to be drained", "waiting_bytes"
    ),
    _Metric(
        "tier_oldest_wait_seconds", "seconds for which the oldest of them has waited", "oldest_s"
    ),
    _Metric("tier_draining", "1 if a process drains the tier now", "is_draining"),
    _Metric(
        "tier_drained_timestamp_seconds",
        "time when the newest drained copy on the tier was drained; 0: none",
        "drained_s",
    ),
)


class PoolCollector:
    """A Prometheus collector for pools. Each request asks the coordinator.

    Args:
        operator: connection to the coordinator.
        wanted: names of pools; none means the first pools by name.
    """

    def __init__(self, operator: Operator, wanted: Sequence[str] = ()) -> None:
        self._operator = operator
        self._wanted = wanted

    def collect(self) -> Iterable[Any]:
        """Yield the metrics of pools and jobs. prometheus_client calls it."""
        begin = time.monotonic()
        look: PoolsLook | None = None  # the coordinator does not answer
        with suppress(OSError):
            look = self._operator.look(self._wanted)
        took = time.monotonic() - begin
        pools = look.pools if look else ()
        failed = look.failed if look else ()
        own = (
            _Metric(
                "up", "1 if the coordinator answers, 0 if it is unreachable", lambda _: bool(look)
            ),
            _Metric(
                "scrape_seconds", "seconds that the coordinator took to answer", lambda _: took
            ),
            _Metric(
                "pools_left_out",
                "number of pools that are not listed",
                lambda _: look.left_out if look else 0,
            ),
        )
        yield from _families("gauge", own, (), [((), None)])
        up = _Metric("pool_up", "1 if the coordinator answers for the pool", float)
        answers = [((one.pool,), 1) for one in pools] + [((one.pool,), 0) for one in failed]
        yield from _families("gauge", [up], ["pool"], answers)
        of_pools = [((one.pool,), one) for one in pools]
        yield from _families("gauge", _OF_POOLS, ["pool"], of_pools)
        yield from _families("counter", _GROWING_OF_POOLS, ["pool"], of_pools)
        so_far = [
            ((one.pool, job.job, job.user), job) for one in pools for job in one.jobs[:_MOST_JOBS]
        ]
        yield from _families("counter", _GROWING_OF_JOBS, ["pool", "job", "user"], so_far)
        alarms = [
            ((*labels, rule), job.alarms.get(rule, 0))
            for labels, job in so_far
            for rule in ALARMS.values()
        ]
        yield from _families("counter", [_ALARMS], ["pool", "job", "user", "rule"], alarms)


def _user_name(number: int) -> str:
    """Return the name of a user; the number as text if it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


class TierCollector:
    """A Prometheus collector for tiers of this node. Each request examines their folders."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    def collect(self) -> Iterable[Any]:
        """Yield the metrics of tiers. prometheus_client calls it."""
        from ioshape._tier.tier import tiers_at  # noqa: PLC0415

        answers: list[tuple[Sequence[str], Any]] = []
        tiers: list[tuple[Sequence[str], Any]] = []
        for folder in self._folders:
            try:
                found = tiers_at(folder)
            except OSError:
                answers.append(((folder,), 0))
            else:
                answers.append(((folder,), 1))
                tiers += [((one.folder, _user_name(one.user)), one) for one in found]
        up = _Metric("tier_up", "1 if the folder can be read", float)
        yield from _families("gauge", [up], ["tier"], answers)
        yield from _families("gauge", _OF_TIERS, ["tier", "user"], tiers)


def _ignore_client(_request: object, _address: object) -> None:
    """Ignore a client that disconnected or timed out: it is not worth a line of output."""


def _terminate(_signal: int, _frame: object) -> None:
    sys.exit(0)


@click.command(short_help="Serve the state of pools or tiers to Prometheus.")
@click.argument("pools", metavar="[POOL]...", nargs=-1, callback=pool_argument)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9721,
    show_default=True,
    help="Port to listen on.",
)
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 for all addresses of this host.",
)
@click.option(
    "--tier",
    "tiers",
    metavar="FOLDER",
    multiple=True,
    type=click.Path(),
    help="Serve the checkpoints that wait on this tier of this node. Can be given several times.",
)
@coordinator_option
def command(
    pools: tuple[str, ...],
    port: int,
    address: str,
    tiers: tuple[str, ...],
    coordinator: str | None,
) -> NoReturn:
    """Serve the state of all pools as metrics for Prometheus, until a signal ends it.

    Examples:

    \b
    ioshape exporter
    ioshape exporter --address 0.0.0.0 --coordinator redis://redis.cluster
    ioshape exporter --address 0.0.0.0 --tier /local/nvme

    Each request asks the coordinator. While the coordinator is unreachable,
    ioshape_up is 0. While it does not answer for one pool, the ioshape_pool_up of
    that pool is 0. Without names it serves the first 128 pools
    by name, and ioshape_pools_left_out counts the others.

    With --tier it serves the checkpoints that wait on that tier of this node, and
    asks no coordinator. As root it serves those of all users.

    This command needs prometheus_client and redis: pip install 'ioshape[exporter]'.

    Exit code: 0 after SIGTERM; 130 after Ctrl-C; 1 if it cannot start.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
    except ImportError:
        raise SentenceError(
            "the exporter needs the package prometheus_client, which is not installed; install it: "
            "pip install 'ioshape[exporter]'"
        ) from None
    registry = CollectorRegistry()
    if tiers:
        registry.register(TierCollector(tiers))
    else:
        with sentences():
            collector = PoolCollector(operator_of(coordinator), pools)
        registry.register(collector)  # calls collect(), so it asks the coordinator once
    socket.setdefaulttimeout(_TIMEOUT_S)
    try:
        started = start_http_server(port, address, registry)
    except OSError as error:
        raise SentenceError(f"cannot listen on {address}, port {port}: {error.strerror}") from None
    signal.signal(signal.SIGTERM, _terminate)
    host = f"[{address}]" if ":" in address else address
    if started:  # prometheus_client before 0.19 (Debian 12 has 0.16) returns None
        server = started[0]
        server.handle_error = _ignore_client  # type: ignore[method-assign, assignment]
        port = server.server_port
    remark(f"metrics are at http://{host}:{port}/metrics")
    while True:
        signal.pause()
