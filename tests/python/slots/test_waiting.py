# SPDX-License-Identifier: Apache-2.0
"""Long waits for a slot are shown: on a terminal in a line that disappears, elsewhere once.

Terminals also show the progress of long loads.
"""

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import ioshape
import pytest
import torch
from checkpoints import wait_until
from command import on_terminal
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

    def __init__(self, folder: Path, how: str, *, terminal: bool, **more: str) -> None:
        # A folder of its own keeps leftovers of other saves from being removed and reported.
        place = folder / f"{how}-{terminal}-{len(more)}"
        place.mkdir()
        self.path, program = place / f"{place.name}.pt", place / "program.py"
        program.write_text(f"{BEGINNING}{SAVES[how]}\n")
        run = ["-m", "ioshape", "run"] if how == "run" else []
        reader, writer = pty.openpty() if terminal else os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, *run, program, self.path],
            env=environment(IOSHAPE_POOL=POOL, **more),
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
        """Wait until the program has reported its wait twice in a line, or once with a newline."""
        name = self.path.name.encode()
        wait_until(
            lambda: self._seen.count(name) > 1 or b"\n" in self._seen,
            f"{self.path.name}: {self._seen!r}",
        )

    def end(self) -> str:
        """Wait for the end of the program, and return everything from its stderr."""
        assert self._process.wait(TIMEOUT_S) == 0, self._seen
        self._thread.join()
        return self._seen.decode()


def left_on(screen: str) -> str:
    """Return the text that the screen shows in the end."""
    lines = []
    for line in screen.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return "\n".join(lines)


@pytest.mark.slow
def test_a_long_wait_is_shown_where_somebody_looks(tmp_path: Path) -> None:
    second = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ioshape.slot(pool=POOL, weight=100):  # the weight excludes all other writers
        shown = [Waiting(tmp_path, how, terminal=True) for how in ("wait", "run")]
        # If another rank owns the terminal, or there is none, one line reports the wait and stays.
        told = [
            Waiting(tmp_path, "save", terminal=True, **second),
            Waiting(tmp_path, "save", terminal=False),
        ]
        for one in (*shown, *told):
            one.wait_for_word()
    for one in shown:
        screen = one.end()
        assert len(re.findall(rf"\r[^\r\n]*{one.path.name}: [^\r\n]*, \d+ s", screen)) > 1, screen
        assert left_on(screen) == ""
    for one in told:
        screen = one.end()
        assert screen.count(one.path.name) == 1, screen
        assert left_on(screen).count("\n") == 1, screen


LOADING = """
import sys
import ioshape
from ioshape._core import terminal as _terminal

for path in sys.argv[1:]:
    for _terminal.LONG_S in (0.0, 1e9):
        ioshape.load(path)
        print("loaded", flush=True)
"""


@pytest.mark.slow
def test_a_long_load_shows_how_far_it_has_come(tmp_path: Path) -> None:
    program, one, many = (tmp_path / name for name in ("program.py", "one.pt", "many.pt"))
    program.write_text(LOADING)
    torch.save(torch.zeros(1 << 20), one)
    torch.save([torch.zeros(1000) for _ in range(100)], many)
    code, screen = on_terminal("run", program, one, many)
    assert code == 0, screen
    *screens, rest = screen.split("loaded\r\n")
    assert rest == ""
    expected = [(one, True), (one, False), (many, True), (many, False)]
    for (path, is_long), part in zip(expected, screens, strict=True):
        told = re.search(rf"\rioshape: loading [^\r\n]*{path.name}: \d+%", part)
        assert bool(told) is is_long, screen
        assert left_on(part) == ""
