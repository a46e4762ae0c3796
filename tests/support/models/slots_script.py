# SPDX-License-Identifier: Apache-2.0
"""Runs slots.lua in a redis-server of its own.

Tests of the rules use it. If a test sets the time and the server's identity, two functions of the
script are replaced by others that read both from keys.
"""

import hashlib
import re
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinators import Connection, Redis, Reply, Value
from tree import LIBRARY

SCRIPT = LIBRARY / "slots" / "slots.lua"


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


class Server(Redis):
    """A running redis-server, and a connection to it."""

    def __init__(self, folder: Path, *lines: str) -> None:
        super().__init__(folder, ['save ""', *lines])
        self.start()
        self.connection = Connection(self.socket)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()
        self.kill()


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
