# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose file tells which of them it holds, and saves that wait where a test wants."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ioshape
import torch
from ioshape._core import config

#: What a gate waits for a test, so that a test that fails does not hang.
LONGEST_WAIT_S = 60.0


def checkpoint(number: int, n_bytes: int = 1 << 20) -> dict[str, Any]:
    """A checkpoint that differs from those of other numbers in every byte of its data."""
    return {
        "number": number,
        "data": torch.full((n_bytes,), number % 250 + 1, dtype=torch.uint8),
    }


def number_in(path: Path | str) -> int:
    """Which checkpoint a file holds, as stock torch reads it; fails if it is not all of one."""
    return _number_of(torch.load(path, weights_only=True), path)


def number_loaded(path: Path | str) -> int:
    """Return which checkpoint a file holds, as ioshape reads it; fail if it is not all of one."""
    return _number_of(ioshape.load(path), path)


def _number_of(loaded: dict[str, Any], path: Path | str) -> int:
    number, data = loaded["number"], loaded["data"]
    assert data.numel() > 0
    assert bool((data == number % 250 + 1).all()), f"{path} is not all of checkpoint {number}"
    assert isinstance(number, int)
    return number


def names_in(folder: Path | str) -> list[str]:
    """All that lies in a folder: a temporary file left there is seen."""
    return sorted(path.name for path in Path(folder).iterdir())


def wait_until(condition: Any, what: str) -> None:
    """For what happens on another thread or in another process."""
    end = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.005)


class Gate:
    """A progress callback that holds a save in a phase until the gate is opened."""

    def __init__(self, phase: str = "plan", then_s: float = 0.0) -> None:
        #: of a save whose temporary file is there, and not one byte in it: "plan"
        self.phase = phase
        #: how long each later call takes, so that the save is slow
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
        """Until a save is at the gate."""
        assert self.reached.wait(LONGEST_WAIT_S), "no save has come to the gate"


@contextmanager
def left_clean() -> Iterator[None]:
    """For a fixture: no test leaves settings, saves or failures to the next."""
    yield
    config.reset()
    assert ioshape.wait_all(LONGEST_WAIT_S), "a save is still under way"
