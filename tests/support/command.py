# SPDX-License-Identifier: Apache-2.0
"""Runs the `ioshape` command like a user."""

import fcntl
import os
import pty
import struct
import subprocess
import sysconfig
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import TIMEOUT_S, environment

IOSHAPE = Path(sysconfig.get_path("scripts")) / "ioshape"

Done = subprocess.CompletedProcess[str]


def call(
    *arguments: str | Path | int,
    prefix: Sequence[str | Path] = (),
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    typed: str = "",
) -> Done:
    """Run the command with these variables, and none of its others from this environment."""
    return subprocess.run(
        [*prefix, IOSHAPE, *map(str, arguments)],
        env=environment(TERM="xterm", **(env or {})),
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


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
