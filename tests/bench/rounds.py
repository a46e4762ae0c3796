# SPDX-License-Identifier: Apache-2.0
"""Samples, and how they are taken and compared.

What is compared runs in turns, so that a machine that is slow for a while is slow for all. A ratio
is taken in each round, and the figure is the median of the ratios: what changes slowly cancels out,
and single outliers do not count.
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
    foreign_bytes: float = 0  # what others read and wrote on the same device meanwhile

    @property
    def gb_per_s(self) -> float:
        return self.bytes / self.seconds / GB


Samples = dict[str, list[Sample]]
Contestants = Mapping[str, Callable[[], Sample]]


def interleave(contestants: Contestants, rounds: int, before_each: Callable[[], None]) -> Samples:
    """Runs each once per round; who begins changes from round to round."""
    names = list(contestants)
    samples: Samples = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before_each()
            samples[name].append(contestants[name]())
    return samples


def disturbed(samples: Sequence[Sample]) -> int:
    """How many had to share the device. Journals and directories are not others."""
    return sum(one.foreign_bytes > one.bytes / 20 + (16 << 20) for one in samples)


def speed_ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Throughput over throughput: more than 1 if ours is faster."""
    return median(a.gb_per_s / b.gb_per_s for a, b in zip(ours, theirs, strict=True))


def time_ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Time over time: less than 1 if ours is faster."""
    return median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))


def median_seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)


def median_gb_per_s(samples: Sequence[Sample]) -> float:
    return median(sample.gb_per_s for sample in samples)


def fastest(samples: Samples, names: Sequence[str]) -> str:
    """The name whose median is the best: one lucky run does not make a setting the best."""
    return max(names, key=lambda name: median_gb_per_s(samples[name]))
