# SPDX-License-Identifier: Apache-2.0
"""Free ports of this host, for servers that tests start."""

import random
import socket
from contextlib import suppress

#: lowest port that the kernel gives to outgoing connections
_GIVEN_AWAY = 32768
_LOWEST = 10000

_chance = random.SystemRandom()  # tests run in parallel, and some seed the default generator


def free_ports(count: int) -> list[int]:
    """Return different ports on which no process listens."""
    found: set[int] = set()
    while len(found) < count:
        port = _chance.randrange(_LOWEST, _GIVEN_AWAY)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.add(port)
    return list(found)


def free_port() -> int:
    """Return a port on which no process listens."""
    return free_ports(1)[0]
