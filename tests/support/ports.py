# SPDX-License-Identifier: Apache-2.0
"""Ports of this host for servers that tests start."""

import random
import socket
from contextlib import suppress

#: From here on the kernel gives ports to connections that go out, whenever somebody makes one.
_GIVEN_AWAY = 32768
_LOWEST = 10000

_chance = random.SystemRandom()  # tests run beside each other, and some seed the usual one


def free_ports(count: int) -> list[int]:
    """Different ones, on which nobody listens."""
    found: set[int] = set()
    while len(found) < count:
        port = _chance.randrange(_LOWEST, _GIVEN_AWAY)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)


def free_port() -> int:
    """One on which nobody listens."""
    return free_ports(1)[0]
