# SPDX-License-Identifier: Apache-2.0
"""Worker processes of "ioshape bench", forked from this process and killed at the end.

The parent sends messages and receives answers. It imports the workers' modules before it forks, and
must not start a thread before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection as connections
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CONTEXT = multiprocessing.get_context("fork")


class _Pace:
    slow = 1.0  # real seconds for each second of now_ns()


def slow_down(factor: float) -> None:
    """Slow down now_ns() by a factor, in this process and in those that it forks later.

    Simulated storage runs in slow time, and needs clocks that match.
    """
    _Pace.slow = factor


def now_ns() -> int:
    """Return the time of a monotonic clock that all processes of this host share."""
    return int(time.clock_gettime_ns(time.CLOCK_MONOTONIC) / _Pace.slow)


def by_the_clock(seconds: float) -> float:
    """Return the real seconds that correspond to seconds of now_ns()."""
    return seconds * _Pace.slow


class MemberError(Exception):
    """A worker process failed. The message names it."""


class _Failed(str):
    """The last answer of a worker process that raised: its error message."""

    __slots__ = ()


@dataclass
class Member:
    """A worker process, as its parent sees it."""

    process: ForkProcess
    connection: Connection

    @property
    def name(self) -> str:
        return self.process.name

    def tell(self, message: object) -> None:
        """Send a message. If the process has ended, waiting for its answer will report it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay the signals that end the program until the end of the block.

    Python drops an exception that a signal handler raises in a function called at a fork.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda given, _frame: came.append(given))
        for number in _ENDING
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for given in came:
        signal.raise_signal(given)


class Crowd:
    """The set of worker processes. Leaving the with block kills all of them."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def __enter__(self) -> Crowd:
        gc.collect()
        gc.freeze()  # otherwise the collector of each child would copy all pages of the parent
        return self

    def __exit__(self, *_what: object) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.connection.close()
        self._members.clear()
        gc.unfreeze()

    def start(self, name: str, work: Callable[[Connection], object]) -> Member:
        """Fork a process that does this work and ends. An exception becomes its last answer."""
        with _signals_wait():  # a signal must not leave a started process that is not listed
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_live, args=(theirs, work, os.getpid()), name=name)
            process.start()
            theirs.close()
            member = Member(process, ours)
            self._members.append(member)
        return member

    def ask(self, asked: Sequence[Member], timeout_s: float, message: object) -> list[Any]:
        """Send a message to these processes. Return their answers in the same order."""
        for member in asked:
            member.tell(message)
        return self.hear(asked, timeout_s)

    def hear(self, asked: Sequence[Member], timeout_s: float) -> list[Any]:
        """Wait for an answer from each of these processes. Return them in the same order.

        Raises:
            MemberError: a process failed or ended, or did not answer in time. It may be one that is
                not among `asked`.
        """
        answers: dict[str, Any] = {}
        end = time.monotonic() + timeout_s
        while len(answers) < len(asked):
            missing = [member for member in asked if member.name not in answers]
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise MemberError(f"{missing[0].name} did not answer within {timeout_s:.0f} s")
            ready = connections.wait(
                [one.connection for one in missing]
                + [one.process.sentinel for one in self._members],
                left_s,
            )
            for member in missing:
                if member.connection in ready:
                    answers[member.name] = _answer_of(member)
            self._check()
        return [answers[member.name] for member in asked]

    def rest(self, seconds: float) -> None:
        """Sleep. Raise MemberError if a process ends meanwhile."""
        connections.wait([one.process.sentinel for one in self._members], seconds)
        self._check()

    def _check(self) -> None:
        for member in self._members:
            if member.process.exitcode is not None:
                _answer_of(member)


def _answer_of(member: Member) -> Any:
    try:
        answer = member.connection.recv()
    except (EOFError, ConnectionResetError):
        member.process.join()
        code = member.process.exitcode or 0
        how = (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        raise MemberError(f"{member.name} {how}") from None
    if isinstance(answer, _Failed):
        raise MemberError(f"{member.name}: {answer}")
    return answer


def _live(connection: Connection, work: Callable[[Connection], object], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills the workers
    for number in _ENDING[1:]:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl()
        os._exit(1)
    try:
        work(connection)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)
