# SPDX-License-Identifier: Apache-2.0
"""The driver's side of torch_process.py, and code that its benchmarks share."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median

from .rounds import Sample
from .setting import Setting
from .worker import Answer, Worker

OURS = "ioshape"
TORCH = "torch"

MIB = 1 << 20

# Factor of memory for one file in the page cache, or for one loaded state, with overhead.
ROOM_FOR_ONE = 1.1

# Number of processes that import torch and make their tensors at the same time.
STARTS_AT_ONCE = 2


@contextmanager
def processes(
    module: str, environments: Iterable[Mapping[str, str] | None]
) -> Iterator[list[Worker]]:
    """Start a process of this module in each environment. None is that of this process."""
    with ExitStack() as stack:
        command = (sys.executable, "-m", f"{__package__}.{module}")
        started = [Worker(*command, environment=one) for one in environments]
        for worker in started:
            stack.enter_context(worker)
        yield started


@contextmanager
def workers(
    names: Iterable[str], prepare: Callable[[Worker], Answer]
) -> Iterator[tuple[dict[str, Worker], Answer]]:
    """Start a process for each name, and yield the processes and the first one's answer.

    Each has its own process, so that no contestant finds memory that another one left behind.
    """
    names = list(names)
    with processes("torch_process", [None] * len(names)) as started:
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            answers = list(pool.map(prepare, started))
        yield dict(zip(names, started, strict=True)), answers[0]


class Ballast:
    """Memory that is held while the storage settles, and freed for the next contestant.

    A virtual machine may return memory to its host that was free for some seconds. The host then
    takes seconds for each GB that is touched again. Contestants that need new memory or the page
    cache would pay for that, and others would not.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.memory: mmap.mmap | None = None

    def take(self) -> None:
        self.memory = mmap.mmap(-1, self.n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), 1, self.n_bytes)

    def give(self) -> None:
        if self.memory:
            self.memory.close()
        self.memory = None


def settle(setting: Setting, needed_bytes: int) -> None:
    """Remove files, wait for the storage, and have this many bytes of memory at hand."""
    setting.clear()
    ballast = Ballast(needed_bytes)
    ballast.take()
    setting.rest()
    ballast.give()


def sample_of(answer: Answer, n_bytes: float) -> Sample:
    return Sample(float(answer["seconds"]), n_bytes, answer)


def save(setting: Setting, worker: Worker, how: str, n_bytes: float) -> Sample:
    return sample_of(worker.ask("save", how=how, path=setting.folder / how), n_bytes)


def median_part(samples: Iterable[Sample], name: str) -> float:
    return median(float(sample.details[name]) for sample in samples)


def parts_in_words(samples: Iterable[Sample], names: str, digits: int = 3) -> str:
    """Return medians of the library's timings, such as "write 0.512 + sync 0.003"."""
    samples = list(samples)
    return " + ".join(
        f"{name} {median_part(samples, f'{name}_s'):.{digits}f}" for name in names.split()
    )
