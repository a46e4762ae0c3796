# SPDX-License-Identifier: Apache-2.0
"""Reads from a file to a GPU by GPUDirect Storage, verified on the GPU.

Only data with a checksum for each block can be read so. The GPU computes the checksums, because the
CPU does not see the bytes. A block with a wrong checksum is read again through the CPU, which finds
out whether the file is damaged.
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

# Each thread makes blocking calls that read one stretch.
_THREADS = 8
# the number of stretches that are read each way to compare the two
_TRIED = 16
_LEAST = 3 * _TRIED + _THREADS + 2


class Direct:
    """A reader of stretches that have one part each, of whole blocks.

    Raises:
        OSError: GPUDirect Storage is not available for this file.
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
        # shutdown() waits, so no call uses the file afterwards.
        self._threads.shutdown(cancel_futures=True)
        self._file.close()

    def bring(
        self,
        wanted: list[Stretch],
        by_cpu: Callable[[Iterable[Stretch]], object],
        tell: Callable[[int], object],
    ) -> None:
        """Read all stretches, directly or with `by_cpu`. The first ones decide which is faster.

        That depends on the storage, on its other users and on the content of the page cache. The
        function `tell` gets the offset in the file up to which direct reads have come.
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

        # The first read of each kind is not timed, because it includes preparations. Direct reads
        # are in no stream. At this point the device has finished all earlier work, because the
        # copies of these stretches came after it.
        cpu_s(take(_TRIED))
        enough_s = cpu_s(take(_TRIED))
        direct_s(take(1))
        is_faster = (
            # If this fails, even all threads together would not be faster.
            direct_s(take(1)) * _TRIED / _THREADS < enough_s
            and direct_s(take(_THREADS)) < math.inf
            and direct_s(take(_TRIED)) < enough_s
        )
        way = "by GPUDirect Storage" if is_faster else "through the CPU, which is not slower"
        if not again:
            self._log.info('loading "%s": %s', self._path, way)
        if is_faster:
            again += self._bring(take(len(left)), tell)
        by_cpu(sorted([*again, *left], key=lambda one: one.begin))

    def _bring(self, wanted: list[Stretch], tell: Callable[[int], object]) -> list[Stretch]:
        """Read stretches directly. Return those that failed or had a wrong checksum."""
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
            except (OSError, RuntimeError) as error:  # RuntimeError: no memory or no thread is left
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
        """Queue the checksums of a stretch. Return the memory to which the stream copies them."""
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
                self._warn(f"the block at offset {offset} did not arrive intact")
                return False
        return True

    def _warn(self, why: str) -> None:
        self._log.warning(
            'loading "%s": GPUDirect Storage: %s; the rest is read through the CPU',
            self._path,
            why,
        )


def share_out(wanted: Iterable[Stretch]) -> tuple[list[Stretch], list[Stretch]]:
    """Split stretches into those that can be read directly and those that need the CPU.

    The remainder of a record behind its last whole block needs the CPU.
    """
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
