# SPDX-License-Identifier: Apache-2.0
"""Coordinators of a test, and processes that hold slots or wait for them."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_port
from processes import environment
from tree import program

TIMEOUT_S = 60.0


def await_true(condition: Callable[[], bool], what: str) -> None:
    """Check a condition repeatedly until it is true."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {TIMEOUT_S:g} s"
        time.sleep(0.02)


class Redis:
    """A redis-server with its own socket and port."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self.socket = folder / "redis.sock"
        self._config = folder / "redis.conf"
        self.port = free_port()
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"unixsocket {self.socket}",
            f"dir {folder}",
            "databases 1000",
            'save ""',
        ]
        if password:
            lines.append(f"requirepass {password}")
        self._config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The address without a password."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Start the server, and return when it listens."""
        self._process = subprocess.Popen(
            [program("redis-server"), self._config], stdout=subprocess.DEVNULL
        )
        await_true(self._listens, "redis-server")

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return self.socket.exists() and probe.connect_ex(str(self.socket)) == 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)


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
        redis = Redis(folder, password)
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
