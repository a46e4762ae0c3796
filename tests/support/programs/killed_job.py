# SPDX-License-Identifier: Apache-2.0
"""A job whose ranks are forked from this process and killed at random times."""

import os
import random
import signal
import time
from collections.abc import Callable

#: longest time after which the remaining ranks are killed
AFTER_S = 0.05


class Job:
    """All ranks, from their fork to their end.

    Each runs body(rank, descriptor for its output lines).
    """

    def __init__(self, ranks: int, body: Callable[[int, int], None]) -> None:
        reading, writing = os.pipe()
        self.pids = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    os.close(reading)
                    body(rank, writing)
                    status = 0
                finally:
                    os._exit(status)
            self.pids.append(pid)
        os.close(writing)
        self.told = os.fdopen(reading)

    def wait(self) -> list[int]:
        self.told.close()
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def kill(self, chance: random.Random, after_s: float, begun: int = 2) -> dict[str, int]:
        """Kill some ranks after the job has printed so many lines, and the others a moment later.

        Each output line is a name and a number. Return the last number of each name.
        """
        lines = [self.told.readline() for _ in range(begun)]
        time.sleep(chance.random() * after_s)
        victims = chance.sample(self.pids, chance.randint(1, len(self.pids)))
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        time.sleep(chance.random() * AFTER_S)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        lines += self.told.readlines()
        statuses = dict(zip(self.pids, self.wait(), strict=True))
        if not all(lines) or statuses[victims[0]] != -signal.SIGKILL:
            raise SystemExit("no rank was there to be killed")
        return {name: int(number) for name, number in (line.split() for line in lines)}
