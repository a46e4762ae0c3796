# SPDX-License-Identifier: Apache-2.0
"""Processes forked from this one that answer its questions, and are gone at the end.

The parent imports what they need before it forks them, and starts no thread until then.
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
    slow = 1.0


def slow_down(factor: float) -> None:
    """From now on, and in processes that are forked later, now_ns() runs so many times slower.

    For a simulated storage whose time does.
    """
    _Pace.slow = factor


def now_ns() -> int:
    """A clock that all processes of this host share and nobody sets."""
    return int(time.clock_gettime_ns(time.CLOCK_MONOTONIC) / _Pace.slow)


def by_the_clock(seconds: float) -> float:
    """How long so many seconds of now_ns() are on this machine."""
    return seconds * _Pace.slow


class MemberError(Exception):
    """A sentence about a process that failed."""


class _Failed(str):
    """The last answer of a process that raised: a sentence."""

    __slots__ = ()


@dataclass
class Member:
    """A process, as its parent sees it."""

    process: ForkProcess
    connection: Connection

    @property
    def name(self) -> str:
        return self.process.name

    def tell(self, message: object) -> None:
        """Sends a message. That the process is gone is noticed when its answer is awaited."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Handle signals that would end the program afterwards.

    Python drops what a handler raises in a function that it calls at a fork.
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
    """All of them; none is left when this is closed."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def __enter__(self) -> Crowd:
        gc.collect()
        gc.freeze()  # otherwise each child's collector copies all pages of the parent
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
        """Forks a process that does this work and ends. What it raises is its last answer."""
        with _signals_wait():  # a member that is started and not listed would be left
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_live, args=(theirs, work, os.getpid()), name=name)
            process.start()
            theirs.close()
            member = Member(process, ours)
            self._members.append(member)
        return member

    def ask(self, asked: Sequence[Member], timeout_s: float, message: object) -> list[Any]:
        """Sends all of them this message; their answers, in the same order."""
        for member in asked:
            member.tell(message)
        return self.hear(asked, timeout_s)

    def hear(self, asked: Sequence[Member], timeout_s: float) -> list[Any]:
        """One answer of each.

        Raises:
            MemberError: one of all, also of those that were not asked, failed or is gone.
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
        """Sleeps. A process that ends meanwhile is an error."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends us
    for number in _ENDING[1:]:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that call
        os._exit(1)
    try:
        work(connection)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)
