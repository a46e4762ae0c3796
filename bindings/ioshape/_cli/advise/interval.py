# SPDX-License-Identifier: Apache-2.0
"""The interval between saves that loses least, after Young and Daly.

Failures come at random, each a mean time M after the last. A job trains for T, and begins a save,
which holds training for h. After d the save is durable, having waited for its slot; training goes
on meanwhile. A failure goes back to the latest save that is durable, and takes a restart R.

Of the time until a failure, the share that is kept is then

    E(T) = T exp(-(T + d + R) / M) / (M (1 - exp(-(T + h) / M)))

With h = d, a save that blocks, that is Daly's exact form. dE/dT = 0 where T = M (1 - exp(-(T + h)
/ M)), whatever d and R are; for a small h that is Young's sqrt(2 h M). d is a limit instead: a save
has to be durable before the next one begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """In seconds."""

    #: between failures of the job
    mtbf: float
    #: a save holds training for so long
    stall: float
    #: from its begin a save takes so long until it is durable, waiting included
    save: float
    restart: float = 0.0

    @property
    def shortest(self) -> float:
        """Of training between two saves: one is durable when the next one begins."""
        return max(self.save - self.stall, 0.0)

    def kept(self, interval: float) -> float:
        """E(T)."""
        left = math.exp(-(interval + self.save + self.restart) / self.mtbf)
        cycle = -math.expm1(-(interval + self.stall) / self.mtbf)
        if interval <= 0:  # the limit; where saves cost anything, nothing else is done
            return 0.0 if self.stall > 0 else left
        return min(interval * left / (self.mtbf * cycle), 1.0) if cycle > 0 else 1.0

    def lost(self, interval: float) -> float:
        """The share of the time that does not go into training that is kept."""
        return 1 - self.kept(interval)

    def held(self, interval: float) -> float:
        """The part of it that saves take whose training was kept."""
        return self.kept(interval) * self.stall / interval if interval > 0 else 0.0

    @property
    def unbounded(self) -> float:
        """The best interval, if saves were durable at once."""
        ratio = self.stall / self.mtbf
        if ratio <= 0:
            return 0.0
        low, high = 0.0, 1.0  # of x = T/M, at which x = 1 - exp(-(x + ratio))
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if -math.expm1(-(middle + ratio)) > middle else (low, middle)
        return high * self.mtbf

    @property
    def best(self) -> float:
        """Loses least."""
        return max(self.unbounded, self.shortest)

    @property
    def young(self) -> float:
        """What Young's rule says of a save that holds training until it is durable."""
        return math.sqrt(2 * self.save * self.mtbf)
