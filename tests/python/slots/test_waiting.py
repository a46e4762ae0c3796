# SPDX-License-Identifier: Apache-2.0
"""Long waits for a slot are shown: on a terminal in a line that disappears, elsewhere once.

Terminals also show the progress of long loads.
"""

import contextlib
import io
import os
import pty
import re
import sys
import threading
from pathlib import Path

import ioshape
import pytest
import torch
from checkpoints import wait_until
from ioshape._core import terminal as ioshape_terminal
from processes import Program, common_forker

POOL = "long-waits"
# Its stderr is the terminal or pipe of that name. The state is too large to pass the queue.
BEGINNING = """
import os
import sys
import ioshape
import torch

_, path, errors = sys.argv
os.dup2(os.open(errors, os.O_WRONLY | os.O_NOCTTY), 2)
state = torch.zeros(5 << 20)
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
        self.path = place / f"{place.name}.pt"
        reader, self._writer = pty.openpty() if terminal else os.pipe()
        (place / "program.py").write_text(f"{BEGINNING}{SAVES[how]}\n")
        command = ["program.py", str(self.path), f"/proc/{os.getpid()}/fd/{self._writer}"]
        variables = {"IOSHAPE_POOL": POOL, **more}
        self._program = Program(place, command, variables, common_forker(under_run=how == "run"))
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
        os.close(self._writer)

    def end(self) -> str:
        """Wait for the end of the program, and return everything from its stderr."""
        with contextlib.closing(self._program):
            self._program.end()
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


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_load_shows_how_far_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, many = tmp_path / "one.pt", tmp_path / "many.pt"
    torch.save(torch.zeros(1 << 20), one)
    torch.save([torch.zeros(1000) for _ in range(100)], many)
    for path in (one, many):
        for long_s in (0.0, 1e9):
            monkeypatch.setattr(ioshape_terminal, "LONG_S", long_s)
            screen = Screen()
            monkeypatch.setattr(sys, "stderr", screen)
            ioshape.load(path)
            told = re.search(rf"\rioshape: loading [^\r\n]*{path.name}: \d+%", screen.getvalue())
            assert bool(told) is (not long_s), screen.getvalue()
            assert left_on(screen.getvalue()) == ""
