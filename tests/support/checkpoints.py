# SPDX-License-Identifier: Apache-2.0
"""Numbered checkpoints whose contents identify them, and saves that wait at a gate of the test."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ioshape
import torch
from ioshape._core import config

#: limit of waits, so that a failed test does not hang
LONGEST_WAIT_S = 60.0


def checkpoint(number: int, n_bytes: int = 1 << 20) -> dict[str, Any]:
    """Return a checkpoint that differs from those of other numbers in every byte of its data."""
    return {
        "number": number,
        "data": torch.full((n_bytes,), number % 250 + 1, dtype=torch.uint8),
    }


def number_in(path: Path | str) -> int:
    """Return the number of the checkpoint in a file, read by stock torch.

    Fail if the file is not whole.
    """
    return _number_of(torch.load(path, weights_only=True), path)


def number_loaded(path: Path | str) -> int:
    """Return the number of the checkpoint in a file, read by ioshape.

    Fail if the file is not whole.
    """
    return _number_of(ioshape.load(path), path)


def _number_of(loaded: dict[str, Any], path: Path | str) -> int:
    number, data = loaded["number"], loaded["data"]
    assert data.numel() > 0
    assert bool((data == number % 250 + 1).all()), f"{path} is not all of checkpoint {number}"
    assert isinstance(number, int)
    return number


def names_in(folder: Path | str) -> list[str]:
    """Return the names of all files in a folder, including temporary ones."""
    return sorted(path.name for path in Path(folder).iterdir())


def wait_until(condition: Any, what: str) -> None:
    """Wait for a condition that another thread or process makes true."""
    end = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.005)


class Gate:
    """A progress callback that stops a save in a phase until the gate is opened."""

    def __init__(self, phase: str = "plan", then_s: float = 0.0) -> None:
        #: phase to stop in; at "plan" the temporary file exists and is empty
        self.phase = phase
        #: duration of each later call, which makes the save slow
        self.then_s = then_s
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, progress: ioshape.types.Progress) -> None:
        if progress.phase == self.phase and not self.opened.is_set():
            self.reached.set()
            if not self.opened.wait(LONGEST_WAIT_S):
                raise TimeoutError("nobody opened the gate")
        elif self.then_s and progress.phase != "stage":
            time.sleep(self.then_s)

    def open(self) -> None:
        self.opened.set()

    def await_save(self) -> None:
        """Wait until a save has reached the gate."""
        assert self.reached.wait(LONGEST_WAIT_S), "no save has come to the gate"


@contextmanager
def left_clean() -> Iterator[None]:
    """Reset settings and wait for all saves at the end of a test. For fixtures."""
    yield
    config.reset()
    assert ioshape.wait_all(LONGEST_WAIT_S), "a save is still under way"
