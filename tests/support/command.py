# SPDX-License-Identifier: Apache-2.0
"""Runs the `ioshape` command like a user."""

import contextlib
import fcntl
import functools
import os
import pty
import struct
import subprocess
import sysconfig
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ioshape._cli.app import COMMANDS
from processes import TIMEOUT_S, Forker, Program, environment

IOSHAPE = Path(sysconfig.get_path("scripts")) / "ioshape"

Done = subprocess.CompletedProcess[str]


#: variables that a Python reads when it starts
_OF_PYTHON = ("PYTHON", "LANG", "LC_", "LD_")

#: held while a forked command runs: a forker is for one thread
_forking = threading.Lock()


@functools.cache
def _forker() -> Forker:
    modules = [f"ioshape._cli.{name}" for name in COMMANDS]
    modules += "rich.console", "rich.live", "rich.table", "redis", "boto3"
    return Forker(modules, shared="command")


def call(
    *arguments: str | Path | int,
    prefix: Sequence[str | Path] = (),
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    typed: str = "",
) -> Done:
    """Run the command with these variables, and none of its others from this environment."""
    words = [*map(str, prefix), str(IOSHAPE), *map(str, arguments)]
    variables = {"TERM": "xterm", **(env or {})}
    # "ioshape run" becomes another Python.
    starts_python = prefix or arguments[:1] == ("run",) or any(map(_is_of_python, variables))
    if not starts_python and _forking.acquire(blocking=False):
        try:
            return _forked(words, folder or Path.cwd(), variables, typed)
        finally:
            _forking.release()
    return subprocess.run(
        words,
        env=environment(**variables),
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _is_of_python(variable: str) -> bool:
    return variable.startswith(_OF_PYTHON)


def _forked(words: Sequence[str], folder: Path, variables: Mapping[str, str], typed: str) -> Done:
    """Run the command in a process that has its imports: they take longer than its work."""
    program = Program(folder, words, variables, _forker())
    with contextlib.closing(program):
        with contextlib.suppress(BrokenPipeError):
            program.stdin.write(typed)
            program.stdin.close()
        return Done(words, *program.outcome())


def succeed(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def fail(done: Done, code: int = 1) -> str:
    """Check that the command failed with this code. Return its one sentence on stderr."""
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("ioshape: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("ioshape: ").rstrip("\n")


def on_terminal(*arguments: str | Path, width: int = 120, height: int = 40) -> tuple[int, str]:
    """Run the command on a terminal of this size. Return the exit code and the output."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    with subprocess.Popen(
        [IOSHAPE, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(TERM="xterm"),
        start_new_session=True,
    ) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not part:
                break
            seen += part
        os.close(controller)
        return process.wait(timeout=TIMEOUT_S), seen.decode()
