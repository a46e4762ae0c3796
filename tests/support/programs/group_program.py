# SPDX-License-Identifier: Apache-2.0
"""The beginning of programs of several ranks: from group_program import *."""

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ioshape
import torch
import torch.distributed
from ioshape._core import under_way

__all__ = [
    "Path",
    "arguments",
    "ioshape",
    "is_right",
    "log_lines",
    "object_of",
    "os",
    "rank",
    "ranks",
    "say",
    "set_up_distributed",
    "shared_memory",
    "sys",
    "time",
    "torch",
]

rank, ranks = ioshape.job()[:2]
if os.environ.get("LEAVE_UNDRAINED"):
    under_way._interrupted = True  # as after Ctrl-C: the exit does not wait for a drain
arguments = sys.argv[1:]


def say(event: str, **more: object) -> None:
    """Report an event to the test.

    Write it with one call, because the ranks of a torchrun share their output.
    """
    line = json.dumps({"event": event, "rank": rank, **more}) + "\n"
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), line.encode())


def log_lines() -> list[str]:
    """Return a list to which ioshape's log lines of every level are appended from now on."""
    lines: list[str] = []
    logger = logging.getLogger("ioshape")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    return lines


def set_up_distributed(timeout_s: float = 60.0) -> None:
    """Initialize torch.distributed, as a training does."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def object_of(which: int, step: int, n_bytes: int = 20_000) -> dict[str, Any]:
    """Return the object that a rank saves at a step. It depends only on the arguments."""
    generator = torch.Generator().manual_seed(1_000_003 * step + which)
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator)
    return {
        "rank": which,
        "step": step,
        "data": data,
        "view": data[n_bytes // 2 :],
        "weights": torch.randn(33, 7, generator=generator),
        "text": "x" * (which + 1),
    }


def is_right(found: Any, which: int, step: int, n_bytes: int = 20_000) -> bool:
    """Return whether an object equals object_of() with these arguments."""
    wanted = object_of(which, step, n_bytes)
    return (
        isinstance(found, dict)
        and list(found) == list(wanted)
        and all(
            torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
            for name, value in wanted.items()
        )
    )


def shared_memory() -> dict[str, int]:
    """Count the shared memory that this process has open or mapped: memory files, and files of
    /dev/shm except those of the store.
    """
    found = {"memory_files": 0, "shm_files": 0}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = str(entry.readlink())
        except OSError:
            continue
        found["memory_files"] += "memfd:" in link
        found["shm_files"] += link.startswith("/dev/shm/") and "/store-" not in link
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found["shm_files"] += sum("/dev/shm/" in line and "/store-" not in line for line in maps)
    return found
