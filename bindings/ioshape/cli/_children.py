# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from this one, asked by lines of JSON, and gone at the end.

Whoever forks them has imported what they need, and started no thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PIECE_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20

Request = dict[str, Any]


def now_ns() -> int:
    """A clock that all processes of this host have in common, and that nobody sets."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def sleep_until(at_ns: int) -> None:
    """By that clock."""
    while (left := at_ns - now_ns()) > 0:
        time.sleep(left / 1e9)


class ChildError(Exception):
    """A sentence about a child that failed."""


class Line:
    """A child's end of the conversation."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def requests(self) -> Iterator[Request]:
        """Until there are no more."""
        while True:
            request = self.next()
            if request is None:
                return
            yield request

    def next(self) -> Request | None:
        """The next one; None when the parent has no more, or is gone."""
        while b"\n" not in self._buffer:
            piece = self._connection.recv(_PIECE_BYTES)
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        request: Request = json.loads(line)
        return request

    def wait(self, seconds: float) -> bool:
        """Whether something has come within that time."""
        if self._buffer:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(max(0, math.ceil(seconds * 1000))))

    def say(self, **what: object) -> None:
        """An answer."""
        self._connection.sendall(json.dumps(what).encode() + b"\n")


@dataclass
class Child:
    """A process, as its parent sees it."""

    name: str
    pid: int
    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    status: int | None = None

    def tell(self, **what: object) -> None:
        """A request. Whoever is gone is noticed when the answer is waited for."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.sendall(json.dumps(what).encode() + b"\n")


class Children:
    """All of them; none is left when this is closed."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Children:
        # What is there now is nobody's garbage: without this each child copies all of it.
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, *_what: object) -> None:
        self.close()

    def start(self, name: str, work: Callable[[Line], object]) -> Child:
        """Forks a process that does this, and then ends. What it raises is its last answer."""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _settle(name, parent)
                ours.close()
                for other in self._children:
                    other.connection.close()
                code = _run(Line(theirs), work)
            finally:
                os._exit(code)  # nothing of the parent's is tidied up here
        theirs.close()
        child = Child(name, pid, ours)
        self._children.append(child)
        return child

    def ask(
        self, children: Iterable[Child], timeout_s: float, **what: object
    ) -> list[dict[str, Any]]:
        """Asks all of them at once; their answers, in the same order."""
        asked = list(children)
        for child in asked:
            child.tell(**what)
        return self.hear(asked, timeout_s)

    def hear(self, children: Iterable[Child], timeout_s: float) -> list[dict[str, Any]]:
        """One answer of each.

        Raises:
            ChildError: one of all, also of those that are not asked, has failed or is gone.
        """
        asked = list(children)
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + timeout_s
        while len(answers) < len(asked):
            left = end - time.monotonic()
            if left <= 0:
                silent = next(child.name for child in asked if child.pid not in answers)
                raise ChildError(f"{silent} has given no answer for {timeout_s:.0f} s")
            self._listen(left)
            for child in asked:
                if child.pid not in answers and b"\n" in child.buffer:
                    line, _, rest = bytes(child.buffer).partition(b"\n")
                    child.buffer[:] = rest
                    answer = json.loads(line)
                    if "error" in answer:
                        raise ChildError(f"{child.name}: {answer['error']}")
                    answers[child.pid] = answer
        return [answers[child.pid] for child in asked]

    def rest(self, seconds: float) -> None:
        """Sleeps; whoever ends meanwhile is noticed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._listen(left)

    def _listen(self, seconds: float) -> None:
        """Takes what comes first, if something comes in that time."""
        poll = select.poll()
        for child in self._children:
            poll.register(child.connection, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(math.ceil(seconds * 1000))}
        for child in self._children:
            if child.connection.fileno() in ready:
                self._take(child)

    def _take(self, child: Child) -> None:
        try:
            piece = child.connection.recv(_PIECE_BYTES)
        except ConnectionResetError:
            piece = b""
        if not piece and b"\n" not in child.buffer:
            raise ChildError(f"{child.name} {self._how_it_ended(child)}")
        child.buffer += piece
        if len(child.buffer) > _MOST_LINE_BYTES:
            raise ChildError(f"{child.name} says more than anybody can hear")

    def _how_it_ended(self, child: Child) -> str:
        end = time.monotonic() + 5.0
        while child.status is None and time.monotonic() < end:
            ended, status = os.waitpid(child.pid, os.WNOHANG)
            if ended:
                child.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        if child.status is None:
            return "does not listen any more"
        if child.status < 0:
            return f"was ended by {signal.Signals(-child.status).name}"
        return f"ended with exit code {child.status}"

    def close(self) -> None:
        """Has them end, whatever they are doing."""
        children, self._children = self._children, []
        for child in children:
            if child.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            child.connection.close()
        for child in children:
            if child.status is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
        gc.unfreeze()


def _settle(name: str, parent: int) -> None:
    """Ctrl-C is for the parent, which ends us; and we end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, name.replace(" ", "-")[:15].encode(), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _run(line: Line, work: Callable[[Line], object]) -> int:
    try:
        work(line)
    except BaseException as error:
        with contextlib.suppress(OSError):
            line.say(error=f"{type(error).__name__}: {error}" if str(error) else repr(error))
        return 1
    return 0
