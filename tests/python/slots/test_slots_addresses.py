# SPDX-License-Identifier: Apache-2.0
"""An operator's calls reach the server that saves use: C parses the address for both."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from coordinators import running_redis
from ioshape._core.context import Context
from ioshape._core.structs import said
from ioshape._slots.pools import Operator, where_is
from ioshape._slots.redis_pools import RedisPools

SECRET = "tr0ub4dor"
TLS = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COORDINATOR", "PASSWORD", "PASSWORD_FILE", "POOL"):
        monkeypatch.delenv(f"IOSHAPE_{name}", raising=False)


def options(address: str) -> list[dict[str, Any]]:
    """Return the options with which the client of each server of an address is created."""
    # A library that was built without TLS refuses a rediss address.
    context = Context(coordinator=address.replace("rediss:", "redis:"))
    pools, where = RedisPools(context), where_is(context, "pool")
    where.address.tls = address.startswith("rediss:")
    nodes = where.address.nodes[0 : where.address.node_count]
    servers: list[Any] = [(said(node.host), node.port) for node in nodes]
    servers = servers or [said(where.address.path)]
    return [pools._client(where, server).connection_pool.connection_kwargs for server in servers]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("redis://cache.example", [{"host": "cache.example", "port": 6379, "db": 0}]),
        ("redis://:p@ss@h:1/", [{"host": "h", "port": 1, "password": "p@ss"}]),
        ("redis://a:7000,[::1]", [{"host": "a", "port": 7000}, {"host": "::1", "port": 6379}]),
        (
            "rediss://ann:pa%3Ass%20w%25rd@10.0.0.7:7001/12",
            [
                {
                    **{"host": "10.0.0.7", "port": 7001, "db": 12},
                    **{"username": "ann", "password": "pa:ss w%rd", **TLS},
                }
            ],
        ),
        ("unix:///run/redis/a%20b.sock?db=3", [{"path": "/run/redis/a b.sock", "db": 3}]),
        ("sentinel://s1,s2:26380/m/4", [{"port": 26379, "db": 4}, {"port": 26380, "db": 4}]),
    ],
)
def test_each_part_of_an_address_reaches_the_client(
    address: str, expected: list[dict[str, Any]]
) -> None:
    found = options(address)
    assert len(found) == len(expected)
    for made, wanted in zip(found, expected, strict=True):
        assert {name: made.get(name) for name in wanted} == wanted
        assert "password" in wanted or not made.get("password")
        # No call takes longer than two seconds, whatever the network does.
        assert 0 < made["socket_timeout"] <= 2
        assert "path" in wanted or 0 < made["socket_connect_timeout"] <= 2


@pytest.mark.parametrize("address", ["redis://h:99999/", f"redis://u:{SECRET}@", "open:house"])
def test_a_wrong_address_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(ValueError, match="coordinator") as caught:
        Operator(address)
    assert SECRET not in str(caught.value)


def test_the_password_is_read_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("wr0ng\n")
    monkeypatch.setenv("IOSHAPE_PASSWORD_FILE", str(file))
    with running_redis(password=SECRET) as redis:
        operator = Operator(redis.address)
        with pytest.raises(ConnectionError):
            operator.names()
        file.write_text(SECRET + "\n")
        assert operator.names() == []
        file.unlink()
        with pytest.raises(ConnectionError, match="password"):
            operator.names()


@contextmanager
def sentinel(port: int) -> Iterator[int]:
    """Serve as a sentinel that reports the master at this port, and yield the sentinel's port."""

    digits = str(port).encode()
    master = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(digits), digits)

    def answer(command: bytes) -> bytes:
        # The client introduces itself first.
        if b"HELLO" in command:
            return b"%1\r\n$5\r\nproto\r\n:3\r\n"
        return master if b"get-master-addr-by-name" in command else b"-ERR unknown command\r\n"

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                while asked := connection.recv(4096):
                    for command in asked.split(b"*")[1:]:
                        connection.sendall(answer(command))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_a_sentinel_names_the_master() -> None:
    with running_redis() as redis, sentinel(redis.port) as port:
        operator = Operator(f"sentinel://127.0.0.1:1,127.0.0.1:{port}/main")
        operator.set("pool", capacity=3)
        assert operator.status("pool").capacity == 3
        assert operator.names() == ["pool"]
        operator.set("pool", clear=True)
        assert operator.status("pool").capacity_by == "default"


@pytest.mark.parametrize(
    "settings",
    [
        {"share": 50},
        {"job": "name", "user": "name"},
        {"job": "name", "capacity": 1},
        {"job": "name", "share": 1_000_001},
        {"job": "n" * 64, "share": 50},
        {"capacity": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"setting|name"):
        Operator("redis://127.0.0.1:1").set("pool", **settings)
