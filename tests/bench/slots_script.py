# SPDX-License-Identifier: Apache-2.0
"""Measure the server time of one call of slots.lua, with few and with very many waiters.

The time is from commandstats. The mix of calls is that of a cluster: clients queue, waiters and
holders send heartbeats, holders release, and the next waiters are granted.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

from coordinators import RefusedByRedis, Value
from slots_script import Script, Server, script_text

WAITERS = [100, 1000, 10_000, 100_000]
CAPACITY = 64
LEASE = 3_600_000  # milliseconds; so long that no lease ends during the benchmark
CALLS = 2000  # in each round
ROUNDS = 3  # the best one counts
AT_ONCE = 100
BATCH = 50
JOBS = 100

Command = list[Value]


class Crowd:
    """A pool with a given number of waiters, and calls whose time is measured."""

    def __init__(self, server: Server, pool: str, waiters: int) -> None:
        self.script = Script(server, script_text(), pool)
        self.connection = server.connection
        self.random = Random(waiters)
        self.made = 0
        # A short lease opens the pool, because a new pool waits half a lease for holders of an
        # earlier one.
        self.script("release", "nobody", 0, lease=1)
        self.call([self.acquire() for _ in range(CAPACITY + waiters)])

    def call(self, commands: list[Command]) -> list[object]:
        answers: list[object] = []
        for start in range(0, len(commands), AT_ONCE):
            answers += self.connection.call_all(commands[start : start + AT_ONCE])
        for answer in answers:
            if isinstance(answer, RefusedByRedis):
                raise answer
        return answers

    def acquire(self) -> Command:
        number = self.made
        self.made += 1
        who: list[Value] = [f"{number % 5000:016x}", f"node{number % 500}", f"job{number % JOBS}"]
        size = self.random.choice([1 << 20, 1 << 30, 1 << 34])
        request: list[Value] = [*who, number % 64, 1, 1, size, CAPACITY, 1, "u", 0]
        request.append(self.random.randint(-300_000, 300_000))
        return self.script.command("acquire", f"id-{number}", *request, lease=LEASE)

    def ids(self, key: str) -> list[str]:
        """Return the ids of holders ("h") or of waiters ("l")."""
        found = self.connection.call("ZRANGE", self.script.prefix + key, 0, -1)
        return [str(name) for name in found] if isinstance(found, list) else []

    def beats(self, key: str) -> list[Command]:
        return [self.beat(name) for name in self.random.choices(self.ids(key), k=CALLS)]

    def beat(self, name: str) -> Command:
        number = int(name.partition("-")[2])
        who: list[Value] = [f"{number % 5000:016x}", f"node{number % 500}", f"job{number % JOBS}"]
        state: list[Value] = [number, 0, 0, 1, 1 << 30, *who, number % 64, 1]
        return self.script.command("beat", name, *state, lease=LEASE)

    def release(self, holder: str) -> Command:
        return self.script.command("release", holder, 1 << 30, lease=LEASE)

    def microseconds(self, commands: list[Command]) -> float:
        """Return the time of one call: the median of small batches, as the machine is shared."""
        batches = [commands[start : start + BATCH] for start in range(0, len(commands), BATCH)]
        return median(self.microseconds_of_batch(batch) for batch in batches)

    def microseconds_of_batch(self, commands: list[Command]) -> float:
        self.connection.call("CONFIG", "RESETSTAT")
        self.call(commands)
        stats = str(self.connection.call("INFO", "commandstats"))
        found = re.search(r"cmdstat_evalsha:calls=(\d+),usec=(\d+)", stats)
        if found is None:
            raise RuntimeError("the server does not count its commands")
        return int(found[2]) / int(found[1])

    def measure_releases(self) -> float:
        """Measure releases. Each grants a slot to the next waiter; later calls refill the queue."""
        spent: list[float] = []
        while len(spent) * CAPACITY < CALLS:
            spent.append(self.microseconds([self.release(held) for held in self.ids("h")]))
            self.call([self.acquire() for _ in range(CAPACITY)])
        return median(spent)

    def measure(self) -> dict[str, float]:
        acquires = self.microseconds([self.acquire() for _ in range(CALLS // 5)])
        return {
            "acquire": acquires,
            "beat of a waiter": self.microseconds(self.beats("l")),
            "beat of a holder": self.microseconds(self.beats("h")),
            "release": self.measure_releases(),
        }


def uncontended(server: Server) -> dict[str, float]:
    """Measure turns in an empty pool."""
    crowd = Crowd(server, "empty", 0)
    crowd.call([crowd.release(held) for held in crowd.ids("h")])
    turns = [crowd.acquire() for _ in range(CALLS // 2)]
    first = crowd.made - len(turns)
    return {
        "turn": crowd.microseconds(
            [
                command
                for number, turn in enumerate(turns)
                for command in (turn, crowd.release(f"id-{first + number}"))
            ]
        )
    }


def best(measured: Callable[[], dict[str, float]]) -> dict[str, float]:
    rounds = [measured() for _ in range(ROUNDS)]
    return {name: min(each[name] for each in rounds) for name in rounds[0]}


def measure_all() -> dict[str, dict[str, float]]:
    """Return microseconds of server time, by number of waiters and by operation."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        found["0"] = best(lambda: uncontended(server))
        for waiters in WAITERS:
            crowd = Crowd(server, f"of{waiters}", waiters)
            found[str(waiters)] = best(crowd.measure)
            server.connection.call("FLUSHALL")
    return found


def figures(found: dict[str, dict[str, float]]) -> dict[str, float]:
    queued = [found[str(waiters)] for waiters in WAITERS]
    growth = {name: [each[name] for each in queued] for name in queued[0]}
    return {
        "script_us_max": max(max(means) for means in growth.values()),
        "script_us_growth": max(max(means) / min(means) for means in growth.values()),
    }
