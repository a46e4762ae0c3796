# SPDX-License-Identifier: Apache-2.0
"""Measure how many bytes of a file are read to load a part of a tensor."""

import os
import sys

import ioshape
import torch

from .setting import Figure, Outcome, Setting
from .torch_process import number_of

ROWS = 100
MOST_BYTES = 1 << 30
BLOCK_BYTES = 1 << 20  # each block has its own checksum


def measure(setting: Setting, outcome: Outcome) -> None:
    path = setting.folder / "parts.pt"
    row = min(setting.size, MOST_BYTES) // ROWS // 4
    setting.say(f"parts: 1 % of a tensor of {4 * row * ROWS / 1e9:.2f} GB")
    ioshape.save({"weight": torch.ones(ROWS, row)}, path)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with ioshape.open(path) as stored:
        weight = stored["weight"]
        before = number_of("io", "read_bytes")
        part = weight[ROWS // 2]
        read = number_of("io", "read_bytes") - before
    path.unlink()
    if not read:
        print(f"{path}: this filesystem's reads are not counted", file=sys.stderr)
        return
    outcome.figures.append(
        Figure(
            "load_slice_bytes_ratio",
            max(read - BLOCK_BYTES, 0) / part.nbytes,
            "<=",
            1.2,
            f"{read / 1e6:.1f} MB read for {part.nbytes / 1e6:.1f} MB, a block of 1 MiB left out",
        )
    )
