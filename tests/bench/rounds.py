# SPDX-License-Identifier: Apache-2.0
"""Take samples and compare them.

Contestants take turns, so that a machine that is slow for a while is slow for all of them. Each
round gives one ratio, and the figure is the median of the ratios. So slow changes cancel out, and
single outliers do not count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

GB = 1e9


@dataclass
class Sample:
    seconds: float
    bytes: float
    details: Mapping[str, float | str] = field(default_factory=dict)
    # bytes that other programs read and wrote on the same device meanwhile
    foreign_bytes: float = 0

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / GB


Samples = dict[str, list[Sample]]
Contestants = Mapping[str, Callable[[], Sample]]


def interleave(contestants: Contestants, rounds: int, before_each: Callable[[], None]) -> Samples:
    """Run each contestant once per round. Another one begins in each round."""
    names = list(contestants)
    samples: Samples = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before_each()
            samples[name].append(contestants[name]())
    return samples


def disturbed(samples: Sequence[Sample]) -> int:
    """Count the samples that shared the device with others. Less than a margin is metadata."""
    return sum(one.foreign_bytes > one.bytes / 20 + (16 << 20) for one in samples)


def speed_ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Return the median ratio of throughputs, which is above 1 if ours is faster."""
    return median(a.gb_per_s / b.gb_per_s for a, b in zip(ours, theirs, strict=True))


def time_ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Return the median ratio of times, which is below 1 if ours is faster."""
    return median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))


def median_seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)


def median_gb_per_s(samples: Sequence[Sample]) -> float:
    return median(sample.gb_per_s for sample in samples)


def fastest(samples: Samples, names: Sequence[str]) -> str:
    """Return the name with the best median, so that one lucky run does not decide."""
    return max(names, key=lambda name: median_gb_per_s(samples[name]))
