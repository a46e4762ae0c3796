# SPDX-License-Identifier: Apache-2.0
"""Try the files of a seed in a process whose memory is limited."""

import ctypes
import gc
import json
import mmap
import os
import resource
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

from .files_tried import WAYS, Base, Damaged, Silent, Wrong, damaged

FILES = 1000

MOST_SECONDS = 2.0
MOST_MIB = 256

M_ARENA_MAX = -8  # from malloc.h


class Shared:
    """State that the parent sees at any time, also after it has killed its child."""

    _FORM = struct.Struct("<qqdd")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._FORM.size)
        self.set(-1, 0, 0, 0)

    def set(self, index: int, way: int, seconds: float, mib: float) -> None:
        self._FORM.pack_into(self._memory, 0, index, way, seconds, mib)

    def get(self) -> tuple[int, int, float, float]:
        index, way, seconds, mib = self._FORM.unpack_from(self._memory)
        return index, way, seconds, mib


def file_of(seed: int, index: int, valid: list[Base]) -> Damaged:
    return damaged(Random(f"{seed}/{index}"), valid)


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def limit_memory() -> None:
    """Limit the address space to what is used and MOST_MIB more.

    malloc() gets one arena, because each arena would reserve 64 MiB of addresses.
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + (MOST_MIB << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def try_file(
    file: Damaged, path: Path, way: Callable[[Path, Damaged], None]
) -> tuple[float, float]:
    """Try a file in one way, and return CPU seconds and MiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    mib, seconds = peak_mib(), time.process_time()
    way(path, file)
    return time.process_time() - seconds, peak_mib() - mib


def try_all(
    seed: int, first: int, valid: list[Base], shared: Shared, folder: Path, say: int
) -> None:
    """Try all files in the child. Each finding is a line of JSON for the parent."""
    warnings.simplefilter("ignore")
    path = folder / "file.pt"
    path.write_bytes(valid[0].data)
    warm = Damaged("", "", valid[0].data, valid[0].data, [valid[0].means])
    for way in WAYS.values():
        way(path, warm)
    gc.collect()
    limit_memory()
    worst = [0.0, 0.0]
    for index in range(first, FILES):
        file = file_of(seed, index, valid)
        path.write_bytes(file.data)
        for number, (name, way) in enumerate(WAYS.items()):
            shared.set(index, number, *worst)
            try:
                seconds, mib = try_file(file, path, way)
                if seconds > MOST_SECONDS or mib > MOST_MIB:
                    raise Wrong(f"takes {seconds:.1f} s and {mib:.0f} MiB")
                worst = [max(worst[0], seconds), max(worst[1], mib)]
            except Wrong as wrong:
                line = json.dumps([index, name, str(wrong), isinstance(wrong, Silent)])
                os.write(say, line.encode() + b"\n")
    shared.set(FILES, 0, *worst)
