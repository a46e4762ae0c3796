# SPDX-License-Identifier: Apache-2.0
"""Runs slots.lua in a redis-server of its own, without a client library.

Tests of the rules use it. If a test sets the time and the server's identity, two functions of the
script are replaced by others that read both from keys.
"""

import hashlib
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tree import LIBRARY, program

SCRIPT = LIBRARY / "slots" / "slots.lua"

Value = str | int | float
Reply = int | str | None | list["Reply"]


class RefusedByRedis(Exception):
    """An error reply of the server."""


def script_text() -> str:
    """Return the script."""
    return SCRIPT.read_text("utf-8")


def _replaced(text: str, name: str, body: str) -> str:
    changed, count = re.subn(
        rf"^local function {name}\(\)\n.*?^end$",
        f"local function {name}()\n{body}\nend",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{SCRIPT} has no function {name}() that a test could replace")
    return changed


def scripted_text() -> str:
    """Return the script with the time read from the key `now`, and the server's identity from
    `info`.
    """
    text = _replaced(script_text(), "server_ms", "\treturn tonumber(call('GET', 'now'))")
    text = _replaced(
        text, "server_process", "\treturn string.match(call('GET', 'info'), 'run_id:(%w+)')"
    )
    return _replaced(text, "server_info", "\treturn call('GET', 'info')")


def fields(reply: Reply) -> dict[str, Any]:
    """Return an answer of the script: a list of names and values, with such lists in it."""
    assert isinstance(reply, list)
    found: dict[str, Any] = {}
    for name, value in zip(reply[::2], reply[1::2], strict=True):
        assert isinstance(name, str)
        found[name] = [fields(row) for row in value] if isinstance(value, list) else value
    return found


def info_text(run: int, uptime_s: int) -> str:
    """Return the part of INFO that the script reads."""
    return f"# Server\r\nrun_id:{run:040x}\r\nuptime_in_seconds:{uptime_s}\r\n"


def _encoded(command: Sequence[Value]) -> bytes:
    parts = [f"*{len(command)}\r\n".encode()]
    for value in command:
        data = str(value).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


class Connection:
    """A connection. Commands can be sent long before their answers are read."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._socket.settimeout(30)
        self._answers = self._socket.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def send(self, commands: Iterable[Sequence[Value]]) -> None:
        self._socket.sendall(b"".join(_encoded(command) for command in commands))

    def receive(self) -> Reply:
        """Receive one answer. Raise an exception for an error."""
        line = self._answers.readline()[:-2]
        kind, rest = line[:1], line[1:].decode()
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"$":
            return None if rest == "-1" else self._answers.read(int(rest) + 2)[:-2].decode()
        if kind == b"*":
            return [self.receive() for _ in range(int(rest))]
        raise RefusedByRedis(rest)

    def receive_any(self) -> Reply | RefusedByRedis:
        try:
            return self.receive()
        except RefusedByRedis as error:
            return error

    def call(self, *command: Value) -> Reply:
        self.send([command])
        return self.receive()

    def call_all(self, commands: Sequence[Sequence[Value]]) -> list[Reply | RefusedByRedis]:
        """Send all commands, then receive all answers, errors included.

        The answers must fit the socket.
        """
        self.send(commands)
        return [self.receive_any() for _ in commands]


class Server:
    """A redis-server that listens only on a socket in this folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "redis"
        command = [program("redis-server"), "--port", "0", "--unixsocket", str(self.path)]
        command += ["--save", "", "--dir", str(folder), "--logfile", str(folder / "redis.log")]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        self._connect()

    def _connect(self) -> None:
        for _ in range(500):
            with suppress(OSError):
                self.connection = Connection(self.path)
                if self.connection.call("PING") == "PONG":
                    return
            time.sleep(0.02)
        self._process.kill()
        raise RuntimeError(f"redis-server did not start; see {self.path.parent / 'redis.log'}")

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


class Script:
    """A loaded script, with the keys of one pool."""

    def __init__(self, server: Server, text: str, pool: str = "test") -> None:
        self.connection = server.connection
        self.prefix = f"{{ios:{pool}}}:"
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.load()

    def load(self) -> None:
        self.connection.call("SCRIPT", "LOAD", self._text)

    def command(
        self, operation: str, subject: str, *arguments: Value, lease: int = 15000, known: int = 0
    ) -> list[Value]:
        """Return a command for `send` and `call_all`."""
        call: list[Value] = ["EVALSHA", self._digest, 1, self.prefix + "m", operation, subject]
        return [*call, lease, known, *arguments]

    def __call__(
        self, operation: str, subject: str, *arguments: Value, lease: int = 15000, known: int = 0
    ) -> Reply:
        command = self.command(operation, subject, *arguments, lease=lease, known=known)
        return self.connection.call(*command)
