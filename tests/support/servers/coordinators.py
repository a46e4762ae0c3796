# SPDX-License-Identifier: Apache-2.0
"""Coordinators of a test, connections to a Redis, and processes that hold slots or wait."""

import atexit
import functools
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ports import free_port
from processes import environment
from tree import program

TIMEOUT_S = 60.0

Value = str | int | float
Reply = int | str | None | list["Reply"]

#: It keeps nothing on the disk, and each test may have a database of its own.
LINES = ("databases 1000", 'save ""')


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Check a condition repeatedly until it is true."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {TIMEOUT_S:g} s"
        time.sleep(0.02)


class RefusedByRedis(OSError):
    """An error reply of the server, or an answer that is not whole."""


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


class Redis:
    """A redis-server or a sentinel with its own folder, socket and port."""

    def __init__(
        self,
        folder: Path,
        lines: Sequence[str] = LINES,
        *,
        port: int = 0,
        sentinel: bool = False,
        prefix: Sequence[str] = (),
        bind: str = "127.0.0.1",
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.socket = folder / "redis.sock"
        self._sentinel = sentinel
        self._prefix = prefix
        self._config = folder / "redis.conf"
        own = [f"bind {bind}", "protected-mode no", f"port {self.port}"]
        own += [f"unixsocket {self.socket}", f"dir {folder}"]
        self._config.write_text("\n".join([*own, *lines]) + "\n", encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process ID, while the server runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def address(self) -> str:
        """The address of the Unix socket, without a password."""
        return f"unix://{self.socket}"

    def start(self, *arguments: str) -> None:
        """Start the server, and return when it answers."""
        command = [*self._prefix, program("redis-server"), str(self._config), *arguments]
        if self._sentinel:
            command.append("--sentinel")
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        await_true(self.answers, "redis-server")

    def answers(self) -> bool:
        """Return whether the server runs and has loaded its data."""
        try:
            return self.ask("PING") == "PONG"
        except RefusedByRedis as error:
            return str(error).startswith("NOAUTH")
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)

    def signal(self, number: int) -> None:
        """Send a signal: SIGSTOP or SIGCONT."""
        os.kill(self.pid, number)

    def ask(self, *command: Value) -> Reply:
        """Run one command, through a connection of its own. Return its answer."""
        connection = Connection(self.socket)
        try:
            return connection.call(*command)
        finally:
            connection.close()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder for sockets, whose paths must be short."""
    folder = Path(tempfile.mkdtemp(prefix="slots-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_redis(password: str = "") -> Iterator[Redis]:
    """Run a server, and kill it at the end."""
    with short_folder() as folder:
        redis = Redis(folder, [*LINES, *([f"requirepass {password}"] if password else [])])
        redis.start()
        try:
            yield redis
        finally:
            redis.kill()


#: time in which a new server grants slots only to former holders, because it might have lost its
#: data; half a lease
GRACE_S = 8.5


@functools.cache
def _shared_redis() -> Redis:
    """Return a server that all tests share and that has run for long enough."""
    folder = short_folder()
    redis = Redis(folder.__enter__())
    atexit.register(folder.__exit__, None, None, None)
    atexit.register(redis.kill)
    redis.start()
    time.sleep(GRACE_S)
    return redis


_databases = itertools.count()


@contextmanager
def coordinator(kind: str) -> Iterator[str]:
    """Yield the address of a new coordinator: "local" or "redis"."""
    if kind == "redis":
        yield f"{_shared_redis().address}?db={next(_databases)}"
    else:
        with short_folder() as folder:
            yield f"local:{folder}"


_WRITER = """
import json, sys
import ioshape

asked = json.loads(sys.argv[1])
said = []

def waiting(place):
    if not said:
        said.append(True)
        print("waits", flush=True)

slot = ioshape.slot(progress=waiting, **asked)
print("holds", flush=True)
for line in sys.stdin:
    word, *numbers = line.split()
    if word == "pace":
        slot.pace(int(numbers[0]))
    elif word == "lost":
        print(slot.lost, flush=True)
    elif word == "release":
        slot.release()
        print("released", flush=True)
"""


class Writer:
    """A process that takes a slot and follows orders."""

    def __init__(
        self, address: str, asked: str, *, job: str = "", rank: int = 0, **more: str
    ) -> None:
        variables = {"IOSHAPE_COORDINATOR": address, "RANK": str(rank), "WORLD_SIZE": "16", **more}
        if job:
            variables["IOSHAPE_JOB"] = job
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, asked],
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> None:
        """Send an order to the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Return the next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def writers() -> Iterator[Callable[..., Writer]]:
    """Yield a function that makes writers, and kill all of them at the end."""
    made: list[Writer] = []

    def make(*arguments: str, **more: object) -> Writer:
        made.append(Writer(*arguments, **more))  # type: ignore[arg-type]
        return made[-1]

    try:
        yield make
    finally:
        for writer in made:
            writer.close()


def node() -> str:
    """Return this host's name as pools show it."""
    return os.uname().nodename
