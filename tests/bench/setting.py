# SPDX-License-Identifier: Apache-2.0
"""The input and output of a benchmark."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from .rounds import (
    Contestants,
    Sample,
    Samples,
    interleave,
    median_gb_per_s,
    median_seconds,
    speed_ratio,
    time_ratio,
)
from .worker import Worker

# Deleting a file frees its blocks on the device only after the journal was written. After this time
# that no longer disturbs the next measurement.
SETTLE_SECONDS = 0.5


SECTOR_BYTES = 512
SECTORS_READ, SECTORS_WRITTEN = 2, 6  # positions in the kernel's statistics of a device


@dataclass
class Setting:
    """The environment and the limits of a benchmark."""

    worker: Worker
    folder: Path  # empty folder of this benchmark on the measured filesystem
    size: int  # bytes of tensors in the large runs
    rounds: int
    on: str = ""  # kind of cluster for storm and preload; "": modelled storage

    def clear(self) -> None:
        """Remove all files and folders."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        os.sync()

    def settle(self) -> None:
        """Remove all files and wait until the storage has finished earlier work."""
        self.clear()
        self.rest()

    def rest(self) -> None:
        os.sync()
        time.sleep(SETTLE_SECONDS)

    def device_bytes(self) -> int:
        """Return bytes read and written since boot, or 0 if the folder is on no block device."""
        number = self.folder.stat().st_dev
        file = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        if not file.exists():
            return 0
        counts = file.read_text(encoding="ascii").split()
        return (int(counts[SECTORS_READ]) + int(counts[SECTORS_WRITTEN])) * SECTOR_BYTES

    def watch(self, contestant: Callable[[], Sample]) -> Sample:
        before = self.device_bytes()
        sample = contestant()
        moved = self.device_bytes() - before
        return replace(sample, foreign_bytes=max(moved - sample.bytes, 0))

    def compare(
        self, contestants: Contestants, rounds: int, before_each: Callable[[], None]
    ) -> Samples:
        watched = {name: partial(self.watch, one) for name, one in contestants.items()}
        return interleave(watched, rounds, before_each)

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    relation: Literal[">=", "<="]
    target: float
    remark: str  # what was compared with what, in raw numbers

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.relation == ">=" else self.value <= self.target


def speed_figure(
    name: str, target: float, samples: Samples, ours: str, theirs: str, remark: str = ""
) -> Figure:
    """Compare the throughput of two contestants."""
    speeds = [median_gb_per_s(samples[one]) for one in (ours, theirs)]
    text = f"{speeds[0]:.2f} GB/s to {speeds[1]:.2f} GB/s of {theirs}{remark}"
    return Figure(name, speed_ratio(samples[ours], samples[theirs]), ">=", target, text)


def time_figure(
    name: str, target: float, samples: Samples, ours: str, theirs: str, remark: str = ""
) -> Figure:
    """Compare the time of two contestants."""
    times = [median_seconds(samples[one]) for one in (ours, theirs)]
    text = f"{times[0]:.3g} s to {times[1]:.3g} s of {theirs}{remark}"
    return Figure(name, time_ratio(samples[ours], samples[theirs]), "<=", target, text)


@dataclass
class Outcome:
    """The results of one benchmark.

    The JSON has `facts` and `samples` in its context.
    """

    figures: list[Figure] = field(default_factory=list)
    ceilings: list[str] = field(default_factory=list)  # sentences about the machine's best speeds
    facts: dict[str, object] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)  # by the part of the benchmark
