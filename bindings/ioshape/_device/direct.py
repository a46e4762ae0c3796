# SPDX-License-Identifier: Apache-2.0
"""From a file to a GPU by GPUDirect Storage, and verified there.

What has a checksum for each of its blocks can come so: the GPU computes what the CPU does not see.
A block that is not as it should be is read again by way of the CPU, which finds out whether the
file is damaged.
"""

from __future__ import annotations

import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ioshape._core.log import logger
from ioshape._device.crc32 import crc32_of_blocks
from ioshape._device.cufile import CuFile
from ioshape._device.stretches import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from ioshape._device.stream import CopyStream
    from ioshape._device.stretches import OpenFile, Stretch

# A call reads a stretch, and returns when it is there.
_THREADS = 8
# So many stretches are read each way to see which one is faster.
_TRIED = 16
_LEAST = 3 * _TRIED + _THREADS + 2


class Direct:
    """Reads stretches of one part, of whole blocks.

    Raises:
        OSError: there is no such way.
    """

    def __init__(self, opened: OpenFile, stream: CopyStream, device: torch.device) -> None:
        self._file = CuFile(opened.descriptor)
        self._path = opened.path
        self._log = logger()
        self._base = opened.base
        self._stream = stream
        self._device = device
        self._threads = ThreadPoolExecutor(_THREADS, "ioshape-direct", self._begin_thread)

    def _begin_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        # No call is under way afterwards.
        self._threads.shutdown(cancel_futures=True)
        self._file.close()

    def bring(
        self,
        wanted: list[Stretch],
        by_cpu: Callable[[Iterable[Stretch]], object],
        tell: Callable[[int], object],
    ) -> None:
        """Brings them, also `by_cpu`: which way is faster is found out with the first ones.

        It depends on the storage and on what else uses it now, and on what the page cache has.
        tell(offset) hears how far it has come past the CPU.
        """
        if len(wanted) < _LEAST:
            by_cpu(wanted)
            return
        left = deque(wanted)
        again: list[Stretch] = []

        def take(count: int) -> list[Stretch]:
            return [left.popleft() for _ in range(count)]

        def cpu_s(tried: list[Stretch]) -> float:
            started = time.monotonic()
            by_cpu(tried)
            return time.monotonic() - started

        def direct_s(tried: list[Stretch]) -> float:
            started = time.monotonic()
            again.extend(tried if again else self._bring(tried, tell))
            return math.inf if again else time.monotonic() - started

        # The first of each has things to prepare. Reads past the CPU are in no stream. But now the
        # device has done what it was asked for earlier: these ones are copied after that.
        cpu_s(take(_TRIED))
        enough_s = cpu_s(take(_TRIED))
        direct_s(take(1))
        is_faster = (
            # Otherwise not even all threads at once would be faster.
            direct_s(take(1)) * _TRIED / _THREADS < enough_s
            and direct_s(take(_THREADS)) < math.inf
            and direct_s(take(_TRIED)) < enough_s
        )
        way = "by GPUDirect Storage" if is_faster else "by way of the CPU, which is not slower"
        if not again:
            self._log.info('loading "%s": %s', self._path, way)
        if is_faster:
            again += self._bring(take(len(left)), tell)
        by_cpu(sorted([*again, *left], key=lambda one: one.begin))

    def _bring(self, wanted: list[Stretch], tell: Callable[[int], object]) -> list[Stretch]:
        """Those that must be read again: they are not as they should be, or could not be read."""
        left = deque(wanted)
        under_way: deque[tuple[Stretch, Future[None]]] = deque()
        sums: list[tuple[Stretch, torch.Tensor]] = []
        failed: list[Stretch] = []
        while under_way or left:
            try:
                while left and len(under_way) < 2 * _THREADS:
                    under_way.append((left[0], self._threads.submit(self._read, left[0])))
                    left.popleft()
                stretch, reading = under_way[0]
                reading.result()
                sums.append((stretch, self._sums(stretch)))
                under_way.popleft()
            except (OSError, RuntimeError) as error:  # or there is no memory, or no thread
                self._warn(f"a read failed ({error})")
                self._threads.shutdown(cancel_futures=True)
                failed = [*(one for one, _ in under_way), *left]
                break
            tell(stretch.begin + stretch.n_bytes)
        self._stream.record().synchronize()
        return failed + [stretch for stretch, found in sums if not self._is_right(stretch, found)]

    def _read(self, stretch: Stretch) -> None:
        part = stretch.parts[0]
        into = part.wanted.into[part.begin : part.begin + part.n_bytes]
        self._file.read(self._base + stretch.begin, into.data_ptr(), part.n_bytes)

    def _sums(self, stretch: Stretch) -> torch.Tensor:
        """Where the CPU can see them, once the stream has done all that it was asked for."""
        part = stretch.parts[0]
        here = self._stream.pinned(part.n_bytes // BLOCK_BYTES * 4)
        memory = part.wanted.into[part.begin : part.begin + part.n_bytes]
        self._stream.compute(lambda: crc32_of_blocks(memory, BLOCK_BYTES).view(-1), here)
        return here

    def _is_right(self, stretch: Stretch, sums: torch.Tensor) -> bool:
        part = stretch.parts[0]
        first = part.begin // BLOCK_BYTES
        for number, found in enumerate(sums.view(-1, 4).tolist()):
            if int.from_bytes(bytes(found), "little") != part.wanted.blocks[first + number]:
                offset = stretch.begin + number * BLOCK_BYTES
                self._warn(f"the block at offset {offset} did not come as it should")
                return False
        return True

    def _warn(self, why: str) -> None:
        self._log.warning(
            'loading "%s": GPUDirect Storage: %s; the rest is read by way of the CPU',
            self._path,
            why,
        )


def share_out(wanted: Iterable[Stretch]) -> tuple[list[Stretch], list[Stretch]]:
    """What may come either way, and what by way of the CPU only, as the end of a record."""
    either: list[Stretch] = []
    by_cpu: list[Stretch] = []
    for stretch in wanted:
        part = stretch.parts[0]
        whole = part.n_bytes // BLOCK_BYTES * BLOCK_BYTES
        if len(stretch.parts) > 1 or part.wanted.blocks is None or not whole:
            by_cpu.append(stretch)
            continue
        either.append(stretch.cut(0, whole))
        if whole < part.n_bytes:
            by_cpu.append(stretch.cut(whole, part.n_bytes))
    return either, by_cpu
