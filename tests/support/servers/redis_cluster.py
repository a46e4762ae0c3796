# SPDX-License-Identifier: Apache-2.0
"""A Redis Cluster for a test: three masters, each with a replica, on this host."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from coordinators import Redis, RefusedByRedis, await_true, short_folder
from ports import free_ports

MASTERS = 3
SLOTS = 16384
NODE_TIMEOUT_MS = 1000


class Node(Redis):
    """A server of the cluster."""

    def __init__(self, folder: Path, port: int, bus_port: int) -> None:
        lines = [
            'save ""',
            f"cluster-port {bus_port}",
            "cluster-enabled yes",
            "repl-diskless-sync-delay 0",
            f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            "cluster-replica-validity-factor 0",
        ]
        super().__init__(folder, lines, port=port)
        self.bus_port = bus_port
        self.start()
        self.id = str(self.ask("CLUSTER", "MYID"))

    def info(self) -> dict[str, str]:
        """Return this node's view of the cluster, and its role."""
        lines = f"{self.ask('CLUSTER', 'INFO')}\n{self.ask('INFO', 'replication')}".split()
        return dict(line.split(":", 1) for line in lines if ":" in line)


class Cluster:
    """The nodes of a cluster: masters first, then the replica of each."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        first = nodes[0]
        for node in nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port)
        for index, node in enumerate(nodes[:MASTERS]):
            part = range(SLOTS * index // MASTERS, SLOTS * (index + 1) // MASTERS)
            node.ask("CLUSTER", "ADDSLOTS", *part)
        for index, node in enumerate(nodes[MASTERS:]):
            await_true(lambda of=nodes[index], who=node: _follows(who, of), "the replicas")  # type: ignore[misc]
        await_true(self.is_well, "the cluster")

    @property
    def address(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def is_well(self) -> bool:
        """Return whether all nodes report a working cluster, and each replica is connected to its
        master.
        """
        for index, node in enumerate(self.nodes):
            info = node.info()
            if info["cluster_state"] != "ok" or info["cluster_known_nodes"] != str(2 * MASTERS):
                return False
            if index >= MASTERS and info.get("master_link_status") != "up":
                return False
        return True

    def slot_of(self, pool: str) -> int:
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", f"{{ios:{pool}}}")
        assert isinstance(slot, int)
        return slot

    def master_of(self, slot: int) -> int:
        """Return the index of a slot's first master."""
        return next(i for i in range(MASTERS) if slot < SLOTS * (i + 1) // MASTERS)

    def move(self, slot: int, source: Node, target: Node, pause_s: float) -> None:
        """Move a slot like redis-cli, with pauses in which it is open and its keys are on either
        node.
        """
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        for _ in range(2):
            time.sleep(pause_s)
            while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
                assert isinstance(keys, list)
                for key in keys:
                    with suppress(RefusedByRedis):  # it was removed meanwhile
                        source.ask("MIGRATE", "127.0.0.1", target.port, str(key), 0, 5000)
        for node in (target, source, *self.nodes[:MASTERS]):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)


def _follows(replica: Node, master: Node) -> bool:
    """Make a node a replica. Return False if it does not know the master yet."""
    with suppress(RefusedByRedis):
        return replica.ask("CLUSTER", "REPLICATE", master.id) == "OK"
    return False


@contextmanager
def redis_cluster() -> Iterator[Cluster]:
    """Start a cluster, and kill its nodes at the end."""
    nodes: list[Node] = []
    with short_folder() as folder, ExitStack() as stack:
        ports = iter(free_ports(4 * MASTERS))
        for index in range(2 * MASTERS):
            nodes.append(Node(Path(folder) / str(index), next(ports), next(ports)))
            stack.callback(nodes[-1].kill)
        yield Cluster(nodes)
