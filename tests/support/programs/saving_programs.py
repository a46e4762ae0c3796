# SPDX-License-Identifier: Apache-2.0
"""Programs that end or fork while saves are in flight."""

from pathlib import Path

import torch
from checkpoints import checkpoint

# The programs' beginning. A save with `progress=slow` takes half a second or longer.
BEGINNING = """
import sys
import threading
import time

import ioshape
from checkpoints import Gate, checkpoint
from ioshape._core import context

MIB = 1 << 20


def slow(progress):
    if progress.phase == "write":
        time.sleep(0.05)


context.test_options["block_bytes"] = 256 << 10
ioshape.configure(engine="buffered")
"""


def saving_program(end: str) -> str:
    """Return the source of a program that ends with this code."""
    return BEGINNING + "\n".join(line.removeprefix("    ") for line in end.splitlines())


def file_to_replace(tmp_path: Path) -> Path:
    """Make a file that will be replaced, in a folder of its own."""
    path = tmp_path / "files" / "model.pt"
    path.parent.mkdir()
    torch.save(checkpoint(1), path)
    return path
