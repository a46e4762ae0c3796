# SPDX-License-Identifier: Apache-2.0
"""Save a state with statistics and without, in turn, and print the samples as JSON.

Arguments: a file to write, the bytes of the state, the rounds, and the name of a torch dtype.
"""

import json
import os
import resource
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import ioshape
import torch

from .rounds import Sample, interleave

# Saves of equal tensors raise the alarm `unchanged`, which is no part of the cost.
WITH, WITHOUT = "unchanged=off", "off"
TENSORS = 8


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def save(state: dict[str, torch.Tensor], path: Path, examine: str) -> Sample:
    """Save durably. `stall_s` is how long the call of a background save takes."""
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    ioshape.configure(examine=examine)
    before, begin = processor_s(), time.perf_counter()
    ioshape.save(state, path)
    seconds, cpu_s = time.perf_counter() - begin, processor_s() - before
    path.unlink()
    begin = time.perf_counter()
    handle = ioshape.save_async(state, path)
    stall_s = time.perf_counter() - begin
    handle.wait()
    return Sample(seconds, n_bytes, {"cpu_s": cpu_s, "stall_s": stall_s})


def prepare(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.sync()
    time.sleep(0.5)


def main() -> None:
    path, size, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dtype = getattr(torch, sys.argv[4])
    count = size // dtype.itemsize // TENSORS
    state = {f"layer{i}": torch.randn(count).to(dtype) for i in range(TENSORS)}
    ways = {way: partial(save, state, path, way) for way in (WITH, WITHOUT)}
    for one in ways.values():
        one()  # the first save of a process prepares its buffers
    samples = interleave(ways, rounds, partial(prepare, path))
    print(json.dumps({way: [asdict(one) for one in found] for way, found in samples.items()}))


if __name__ == "__main__":
    main()
