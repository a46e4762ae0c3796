# SPDX-License-Identifier: Apache-2.0
"""Measure how soon the slot of a killed process is granted again."""

import random
import time
from statistics import median

from .setting import Figure, Outcome, Setting
from .slots_turns import new_worker
from .worker import Worker

LEASE_MS = 3000
BEAT_MS = LEASE_MS / 3
AT_ONCE, TIMES = 8, 3  # with Redis, where each takes about one lease
LOCAL_DEATHS = 30
BYTES = 64 << 20  # too many for the small-file bypass of the queue


class Heirs:
    """A process that holds a slot, and a process that waits for it."""

    def __init__(self, setting: Setting, address: str, pool: str) -> None:
        self._setting, self._address, self._pool = setting, address, pool
        self._holder = self._open()
        self._holder.ask("acquire", bytes=BYTES)

    def _open(self) -> Worker:
        return new_worker(self._setting, self._address, self._pool, slots=1, lease_ms=LEASE_MS)

    def gather(self) -> None:
        """Start one more process that waits."""
        self._waiter: Worker = self._open()
        self._waiter.tell("acquire", bytes=BYTES)

    def kill(self) -> None:
        self._killed_s = time.monotonic()
        self._holder.process.kill()
        self._holder.process.wait()

    def inherit(self) -> float:
        """Return the seconds from the kill to the waiter's grant. The waiter is the next holder."""
        seconds = float(self._waiter.hear("acquire")["at_s"]) - self._killed_s
        self._holder = self._waiter
        return seconds

    def close(self) -> None:
        with self._holder:
            self._holder.ask("release")


def measure_redis(setting: Setting, outcome: Outcome, redis: str) -> None:
    setting.say(f"{AT_ONCE * TIMES} holders die, with Redis")
    pools = [Heirs(setting, redis, f"dying-{number}") for number in range(AT_ONCE)]
    chance = random.Random(4)
    ratios = []
    for _ in range(TIMES):
        for pool in pools:
            pool.gather()
        # Kill after the first heartbeat, at a random time between two heartbeats.
        time.sleep(BEAT_MS / 1e3)
        for pool in pools:
            time.sleep(chance.random() * BEAT_MS / 1e3 / AT_ONCE * 2)
            pool.kill()
        ratios += [pool.inherit() * 1e3 / (LEASE_MS + BEAT_MS) for pool in pools]
    for pool in pools:
        pool.close()
    outcome.facts["redis_reclaim"] = {"lease_ms": LEASE_MS, "beat_ms": BEAT_MS, "ratios": ratios}
    outcome.figures.append(
        Figure(
            "redis_reclaim_vs_bound",
            max(ratios),
            "<=",
            1,
            f"the longest of {len(ratios)}, to a lease of {LEASE_MS / 1e3:g} s and a beat; "
            f"half within {median(ratios):.2f}",
        )
    )


def measure_local(setting: Setting, outcome: Outcome, local: str) -> None:
    setting.say(f"{LOCAL_DEATHS} holders die, on this host")
    pool = Heirs(setting, local, "dying")
    chance = random.Random(4)
    spent = []
    for _ in range(LOCAL_DEATHS):
        pool.gather()
        time.sleep(0.1 + chance.random() / 10)
        pool.kill()
        spent.append(pool.inherit() * 1e3)
    pool.close()
    outcome.facts["local_reclaim_ms"] = spent
    outcome.figures.append(
        Figure(
            "local_reclaim_ms",
            max(spent),
            "<=",
            50,
            f"the longest of {len(spent)}; half within {median(spent):.1f} ms",
        )
    )


def measure(setting: Setting, outcome: Outcome, redis: str, local: str) -> None:
    measure_redis(setting, outcome, redis)
    measure_local(setting, outcome, local)
