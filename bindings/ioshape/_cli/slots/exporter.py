# SPDX-License-Identifier: Apache-2.0
"""ioshape exporter."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import click

from ioshape._cli.output import SentenceError, note
from ioshape._cli.slots.pools import (
    completed_pool,
    coordinator_option,
    operator_of,
    pool_argument,
    sentences,
    tier_option,
    user_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ioshape._slots.pools import Operator, PoolFailure, PoolStatus
    from ioshape._tier.look import Tier

# Several servers may ask at the same time: the coordinator hears of it once.
_CACHE_S = 1.0
# Labels are for ever: no more jobs than these of a pool have their own, the rest is one.
_MOST_JOBS = 50
_OTHERS = "(others)"
# For a client that asks nothing, or takes no answer.
_TIMEOUT_S = 10
# Prometheus needs one. A connection beyond them ends the oldest one.
_MOST_CONNECTIONS = 32


def _jobs(pool: PoolStatus) -> dict[str, tuple[int, int, int]]:
    """Slots, bytes and waiters of each job; of those beyond the limit together."""
    slots: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    waiters: Counter[str] = Counter()
    for one in pool.holders:
        slots[one.job] += one.weight
        passed[one.job] += one.passed
    for one in pool.waiters:
        waiters[one.job] += 1
    jobs: dict[str, tuple[int, int, int]] = {}
    for job in [*slots, *(job for job in waiters if job not in slots)]:
        name = job if len(jobs) < _MOST_JOBS else _OTHERS
        before = jobs.get(name, (0, 0, 0))
        mine = (slots[job], passed[job], waiters[job])
        jobs[name] = (before[0] + mine[0], before[1] + mine[1], before[2] + mine[2])
    return jobs


def _settings(pool: PoolStatus) -> int:
    """Count what the operator has set and a look can tell."""
    return len(pool.limits) + sum(
        (
            pool.capacity_by == "operator",
            pool.pool_bytes_per_s > 0,
            pool.job_bytes_per_s > 0,
        )
    )


class PoolCollector:
    """The state of pools; each request of Prometheus asks the coordinator."""

    def __init__(self, operator: Operator, wanted: Sequence[str] = ()) -> None:
        self._operator = operator
        self._wanted = wanted
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._pools: tuple[PoolStatus, ...] = ()
        self._failed: tuple[PoolFailure, ...] = ()
        self._left_out = 0
        self._up = False
        self._took = 0.0

    def collect(self) -> Iterable[Any]:
        """For prometheus_client."""
        with self._lock:
            if time.monotonic() - self._asked >= _CACHE_S:
                self._ask()
            jobs = [*self._about_jobs(), *self._about_writes()]
            return [*self._about_us(), *self._about_pools(), *jobs]

    def _ask(self) -> None:
        begin = time.monotonic()
        try:
            look = self._operator.look(self._wanted)
        except OSError:
            self._pools, self._failed, self._left_out, self._up = (), (), 0, False
        else:
            self._pools, self._failed, self._left_out = look.pools, look.failed, look.left_out
            self._up = True
        self._asked = time.monotonic()
        self._took = self._asked - begin

    def _about_us(self) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        yield GaugeMetricFamily(
            "ioshape_up", "1 if the coordinator answers, 0 if it is away", value=float(self._up)
        )
        yield GaugeMetricFamily(
            "ioshape_scrape_seconds", "how long the coordinator took", value=self._took
        )
        yield GaugeMetricFamily(
            "ioshape_pools_left_out", "pools beyond those that are listed", value=self._left_out
        )
        up = GaugeMetricFamily(
            "ioshape_pool_up", "1 if the coordinator answers for the pool", labels=["pool"]
        )
        for one in self._pools:
            up.add_metric([one.pool], 1)
        for failed in self._failed:
            up.add_metric([failed.pool], 0)
        yield up

    def _about_pools(self) -> Iterable[Any]:
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        gauges: tuple[tuple[str, str, Callable[[PoolStatus], float]], ...] = (
            ("capacity_slots", "slots of the pool", lambda one: one.capacity),
            (
                "capacity_by_operator",
                "1 if the operator has set the capacity",
                lambda one: one.capacity_by == "operator",
            ),
            ("used_slots", "slots that are taken, by weight", lambda one: one.used),
            ("holders", "writers that hold slots", lambda one: one.holder_count),
            ("waiters", "writers in the queue", lambda one: one.waiter_count),
            (
                "oldest_slot_seconds",
                "how long the oldest holder has had its slot",
                lambda one: max((member.since_s for member in one.holders), default=0),
            ),
            (
                "oldest_wait_seconds",
                "how long the longest in the queue has waited",
                lambda one: max((member.since_s for member in one.waiters), default=0),
            ),
            (
                "shortest_lease_seconds",
                "what the lease nearest to its end has left",
                lambda one: min((member.lease_s for member in one.holders), default=0),
            ),
            (
                "rate_limit_bytes_per_second",
                "set by the operator for the pool; 0: any",
                lambda one: one.pool_bytes_per_s,
            ),
            (
                "job_rate_limit_bytes_per_second",
                "set by the operator for each job; 0: any",
                lambda one: one.job_bytes_per_s,
            ),
            (
                "settings",
                "how many of capacity, rates and limits the operator has set",
                _settings,
            ),
            (
                "changed_timestamp_seconds",
                "when an operator last changed something; 0: never",
                lambda one: one.changed_s,
            ),
        )
        for name, about, value in gauges:
            family = GaugeMetricFamily(f"ioshape_pool_{name}", about, labels=["pool"])
            for one in self._pools:
                family.add_metric([one.pool], float(value(one)))
            yield family
        counters: tuple[tuple[str, str, Callable[[PoolStatus], float]], ...] = (
            ("grants", "slots given so far", lambda one: one.grants),
            ("written_bytes", "bytes that were written in slots", lambda one: one.written_bytes),
            ("held_seconds", "how long slots were held, together", lambda one: one.held_s),
            ("waited_seconds", "how long slots were waited for", lambda one: one.waited_s),
        )
        for name, about, value in counters:
            counter = CounterMetricFamily(f"ioshape_pool_{name}", about, labels=["pool"])
            for one in self._pools:
                counter.add_metric([one.pool], float(value(one)))
            yield counter

    def _about_jobs(self) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        families = [
            GaugeMetricFamily(f"ioshape_job_{name}", about, labels=["pool", "job"])
            for name, about in (
                ("slots", "slots that the job's writers hold, by weight"),
                ("passed_bytes", "bytes that have gone through the slots it holds now"),
                ("waiters", "of its writers among the first of the queue"),
            )
        ]
        for one in self._pools:
            for job, values in _jobs(one).items():
                for family, value in zip(families, values, strict=True):
                    family.add_metric([one.pool, job], value)
        return families

    def _about_writes(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

        labels = ["pool", "job", "user"]
        families = [
            CounterMetricFamily(f"ioshape_job_{name}", about, labels=labels)
            for name, about in (
                ("written_bytes", "bytes that the job wrote in its slots"),
                ("writes", "slots that the job had"),
                ("held_seconds", "how long the job held slots, together"),
                ("waited_seconds", "how long the job waited for slots"),
            )
        ]
        for one in self._pools:
            for job in one.jobs[:_MOST_JOBS]:
                values = (job.written_bytes, job.writes, job.held_s, job.waited_s)
                for family, value in zip(families, values, strict=True):
                    family.add_metric([one.pool, job.job, job.user], value)
        return families


_ABOUT_TIERS: tuple[tuple[str, str, Callable[[Tier], float]], ...] = (
    ("waiting", "saves that wait to be drained", lambda one: one.waiting),
    ("waiting_bytes", "their bytes", lambda one: one.waiting_bytes),
    ("oldest_wait_seconds", "how long the longest of them has waited", lambda one: one.oldest_s),
    ("draining", "1 if a process drains them now", lambda one: one.is_draining),
    (
        "drained_timestamp_seconds",
        "when the last of those that are still there was drained; 0: none",
        lambda one: one.drained_s,
    ),
)


class TierCollector:
    """Looks at tiers when somebody asks."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = folders

    def collect(self) -> Iterable[Any]:
        """For prometheus_client."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        from ioshape._tier.look import tiers_at  # noqa: PLC0415

        up = GaugeMetricFamily(
            "ioshape_tier_up", "1 if the folder can be looked at", labels=["tier"]
        )
        tiers: list[Tier] = []
        for folder in self._folders:
            try:
                tiers += tiers_at(folder)
            except OSError:
                up.add_metric([folder], 0)
            else:
                up.add_metric([folder], 1)
        yield up
        for name, about, value in _ABOUT_TIERS:
            family = GaugeMetricFamily(f"ioshape_tier_{name}", about, labels=["tier", "user"])
            for one in tiers:
                family.add_metric([one.folder, user_name(one.user)], float(value(one)))
            yield family


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server with a limit of connections.

    prometheus_client has a server, too, but tells its port since 0.19 only; Debian 12 has 0.16.
    """

    daemon_threads = True
    request_queue_size = 128  # the kernel's usual limit is 5

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._open: dict[Any, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        super().__init__(*arguments, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; the oldest connections beyond the limit end."""
        with self._lock:
            self._open[request] = None
            for one in list(self._open)[:-_MOST_CONNECTIONS]:
                del self._open[one]
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)  # which ends its thread
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection whose thread has ended."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of ours only, not those of clients that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        pass


def _terminate(_signal: int, _frame: object) -> None:
    sys.exit(0)


@click.command(short_help="Serve the same to Prometheus.")
@click.argument(
    "pools", metavar="[POOL]...", nargs=-1, callback=pool_argument, shell_complete=completed_pool
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9721, show_default=True, help="To listen on."
)
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    help="To listen on; 0.0.0.0 for all of this host.",
)
@tier_option
@coordinator_option
def command(
    pools: tuple[str, ...],
    port: int,
    address: str,
    tiers: tuple[str, ...],
    coordinator: str | None,
) -> int:
    """Serves the state of all pools as metrics for Prometheus, until it is ended.

    \b
    ioshape exporter
    ioshape exporter --address 0.0.0.0 --coordinator redis://redis.cluster
    ioshape exporter --address 0.0.0.0 --tier /local/nvme

    Each request asks the coordinator, at most once a second. While that is
    unreachable, ioshape_up is 0; while it does not answer for one pool, that pool's
    ioshape_pool_up is. Without names it serves the first 128 pools by name, and
    ioshape_pools_left_out counts the others. With --tier it serves what waits on
    that tier of this node instead, as root that of all users, and asks no coordinator.

    Needs prometheus_client and redis: pip install 'ioshape[exporter]'.

    Exit code: 0 when it is ended by SIGTERM; 130 by Ctrl-C; 1 if it cannot begin.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app  # noqa: PLC0415
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
        registry.register(collector)  # asks the coordinator, to know the names of the metrics
    try:
        server = make_server(
            address,
            port,
            make_wsgi_app(registry),
            _Server6 if ":" in address else _Server,
            _Silent,
        )
    except OSError as error:
        raise SentenceError(f"cannot listen on {address}, port {port}: {error.strerror}") from None
    signal.signal(signal.SIGTERM, _terminate)
    host = f"[{address}]" if ":" in address else address
    note(f"metrics are at http://{host}:{server.server_port}/metrics")
    server.serve_forever()
    return 0
