# SPDX-License-Identifier: Apache-2.0
"""A long wait for a slot is reported on stderr, in one line."""

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import ioshape
import pytest
from checkpoints import wait_until
from processes import TIMEOUT_S, environment

POOL = "long-waits"
# Too large to pass the queue.
BEGINNING = """
import sys
import ioshape
import torch

path, state = sys.argv[1], torch.zeros(5 << 20)
"""
SAVES = {
    "save": "ioshape.save(state, path)",
    "wait": "ioshape.save_async(state, path).wait()",
    "run": "torch.save(state, path)",
}


class Waiting:
    """A program that saves, and the content of its stderr, which may be a terminal."""

    def __init__(self, folder: Path, how: str, *, terminal: bool) -> None:
        # A folder of its own keeps leftovers of other saves from being removed and reported.
        place = folder / f"{how}-{terminal}"
        place.mkdir()
        self.path, program = place / f"{place.name}.pt", place / "program.py"
        program.write_text(f"{BEGINNING}{SAVES[how]}\n")
        run = ["-m", "ioshape", "run"] if how == "run" else []
        reader, writer = pty.openpty() if terminal else os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, *run, program, self.path],
            env=environment(IOSHAPE_POOL=POOL),
            stdin=subprocess.DEVNULL,
            stderr=writer,
        )
        os.close(writer)
        self._seen = bytearray()
        self._thread = threading.Thread(target=self._read, args=(reader,))
        self._thread.start()

    def _read(self, reader: int) -> None:
        try:
            while part := os.read(reader, 65536):
                self._seen += part
        except OSError:  # EIO: the program has closed the terminal
            pass
        os.close(reader)

    def wait_for_word(self) -> None:
        """Wait until the program has reported its wait."""
        wait_until(lambda: b"\n" in self._seen, f"{self.path.name}: {self._seen!r}")

    def end(self) -> str:
        """Wait for the end of the program, and return everything from its stderr."""
        assert self._process.wait(TIMEOUT_S) == 0, self._seen
        self._thread.join()
        return self._seen.decode()


@pytest.mark.slow
def test_a_long_wait_is_reported_once(tmp_path: Path) -> None:
    with ioshape.slot(pool=POOL, weight=100):  # the weight excludes all other writers
        told = [
            *(Waiting(tmp_path, how, terminal=True) for how in SAVES),
            Waiting(tmp_path, "save", terminal=False),
        ]
        for one in told:
            one.wait_for_word()
    for one in told:
        screen = one.end()
        assert screen.count(one.path.name) == 1, screen
        assert screen.count("\n") == 1, screen
