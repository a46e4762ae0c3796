# SPDX-License-Identifier: Apache-2.0
"""What a benchmark gets to work with, and what it gives back."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from .rounds import Contestants, Sample, Samples, interleave
from .worker import Worker

# Deleting a file gives its blocks back to the device after the journal has been written; a moment
# later that no longer disturbs whoever comes next.
SETTLE_SECONDS = 0.5


SECTOR_BYTES = 512
SECTORS_READ, SECTORS_WRITTEN = 2, 6  # positions in the kernel's statistics of a device


@dataclass
class Setting:
    """Where and how much."""

    worker: Worker
    folder: Path  # ours alone, on the filesystem to be measured
    size: int  # bytes of tensors in the large runs
    rounds: int
    chaos: float = 0  # how long the campaign of faults is; 0: there is none
    on: str = ""  # the kind of cluster for storm and tenants; "": models of storage, and CephFS

    def settle(self) -> None:
        """Removes everything and waits until the storage has nothing left to do from before."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.rest()

    def rest(self) -> None:
        os.sync()
        time.sleep(SETTLE_SECONDS)

    def device_bytes(self) -> int:
        """Read and written since the machine started; 0 where there is no device to ask."""
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


@dataclass
class Outcome:
    """Of one benchmark. `facts` and `samples` end up in the context of the JSON."""

    figures: list[Figure] = field(default_factory=list)
    ceilings: list[str] = field(default_factory=list)  # what the machine gave at best, as sentences
    facts: dict[str, object] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)  # by the part of the benchmark
