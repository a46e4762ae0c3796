# SPDX-License-Identifier: Apache-2.0
"""Measure the load on Redis: slots.lua runs each request and heartbeat of each simulated node."""

import re
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinators import Connection
from slots_script import Server

from .cluster import Cluster
from .script import Real, Scripted
from .storage import Storage
from .workload import jobs

MIB = 1 << 20
CONNECTIONS = 1000  # idle connections whose memory is measured
#: Time until Redis frees the buffers of idle connections.
IDLE_S = 8.0
AFTER_S = 30.0  # time for which a failover is watched


def number(server: Server, section: str, name: str) -> float:
    found = re.search(rf"^{name}:([\d.]+)", str(server.connection.call("INFO", section)), re.M)
    assert found
    return float(found[1])


def cpu_seconds(server: Server) -> float:
    return sum(number(server, "cpu", f"used_cpu_{kind}") for kind in ("user", "sys"))


def connection_bytes(folder: Path) -> float:
    """Return the memory of one connection that has sent a command and is idle."""
    with Server(folder, f"maxclients {CONNECTIONS + 32}") as server:
        before = number(server, "memory", "used_memory")
        connections = [Connection(server.socket) for _ in range(CONNECTIONS)]
        for connection in connections:
            connection.call("TIME")
        time.sleep(IDLE_S)
        used = number(server, "memory", "used_memory") - before
        for connection in connections:
            connection.close()
    return used / CONNECTIONS


def fail_over(cluster: Cluster, queue: Scripted) -> dict[str, float]:
    """Let Redis lose all data, as in a failover without a replica. It answers at once."""
    before, at = cluster.counts.most_writing, cluster.now
    queue.fail_over(lose_all=True)
    cluster.run(at + AFTER_S)
    grants = [when for when, _ in cluster.grants if when > at]
    return {
        "none_granted_s": max(b - a for a, b in pairwise([at, *grants, at + AFTER_S])),
        "most_writing": cluster.counts.most_writing,
        "most_writing_before": before,
    }


def measure(storage: Storage, count: int, nodes: int, seconds: float) -> dict[str, float]:
    """Measure the load of normal operation.

    Each call is a round trip, as calls of different nodes are.
    """
    work = jobs(count, nodes, storage.bandwidth, 1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        per_connection = connection_bytes(folder)
        with Server(folder) as server:
            rules = Real(server, at_once=1)
            queue = Scripted(rules, storage.writers)
            cluster = Cluster(work, storage, queue)
            cluster.start()
            cluster.run(seconds / 3)  # until the queue has its usual length
            cpu, calls = cpu_seconds(server), rules.calls
            cluster.run(seconds)
            cpu, calls = cpu_seconds(server) - cpu, rules.calls - calls
            waiting, connected = cluster.counts.most_waiting, cluster.counts.most_connected
            failed_over = fail_over(cluster, queue)
            data = number(server, "memory", "used_memory_peak")
    # Each node has one connection for commands and one that waits.
    connections = 2 * connected
    return {
        "nodes": sum(job.nodes for job in work),
        "calls_per_s": calls / (seconds * 2 / 3),
        "cpu": cpu / (seconds * 2 / 3),
        "us_per_call": cpu / max(calls, 1) * 1e6,
        "data_mib": data / MIB,
        "connection_kib": per_connection / 1024,
        "connections": connections,
        "mib": (data + connections * per_connection) / MIB,
        "most_waiting": waiting,
        "requests": cluster.counts.granted,
        **failed_over,
    }


def measure_storm(storage: Storage, count: int, nodes: int, seconds: float) -> dict[str, float]:
    """Measure a storm: all nodes ask at the same moment, and wait."""
    work = jobs(count, nodes, storage.bandwidth, 1)
    with TemporaryDirectory() as name, Server(Path(name)) as server:
        rules = Real(server, at_once=1)
        cluster = Cluster(work, storage, Scripted(rules, storage.writers))
        cluster.start_storm()
        cluster.run(0.0)
        asked = cpu_seconds(server)
        cluster.run(seconds)
        return {
            "asking_cpu_s": asked,
            "waiting_cpu": (cpu_seconds(server) - asked) / seconds,
            "most_waiting": cluster.counts.most_waiting,
            "data_mib": number(server, "memory", "used_memory_peak") / MIB,
        }
