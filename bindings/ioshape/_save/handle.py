# SPDX-License-Identifier: Apache-2.0
"""A save in the background, as its caller holds it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ioshape._core import terminal as _terminal
from ioshape._core import trace, under_way
from ioshape._core.errors import SkippedWarning, StorageError, failure, last_failure, warn_skipped
from ioshape._core.report import PHASES, Progress, Report, Step, from_struct
from ioshape._core.structs import said, sized
from ioshape._native import ffi, lib
from ioshape._tier.route import directly

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import Protocol

    from ioshape._core.context import Context
    from ioshape._save.lazy import Steps
    from ioshape._tier.route import Route

    class Cause(Protocol):
        """Something that knows more about a failure than its code."""

        def cause(self) -> BaseException | None:
            """What it met, if it met something."""


# How long the library waits at a time. Between two waits Python looks for signals: Ctrl-C.
_SLICE_MS = 50

# After so long of waiting for a slot the library logs it, and a terminal shows it.
_LONG_S = 5.0

_UNDER_WAY = -errno.EINPROGRESS


class SaveHandle:
    """A save in the background, as ioshape.save_async() gives it.

    Keep it or drop it: the save goes on either way. If it fails and nobody has asked how it went,
    the next save raises the error, or the end of the process reports it.

    It can be awaited in asyncio: `report = await handle`.
    """

    def __init__(
        self,
        save: Any,
        context: Context | None,
        route: Route,
        *,
        pickle_s: float = 0.0,
        keep: Iterable[object] = (),
        failures: Iterable[Any] = (),
        notes: tuple[str, ...] = (),
        causes: Iterable[Cause] = (),
    ) -> None:
        # A pointer to the pointer. When it goes the save is freed, which aborts it if it has not
        # ended.
        self._save = save
        self._pointer = save[0] if save is not None else ffi.NULL
        self._context = context
        self._owner = os.getpid()
        self._pickle_s = pickle_s
        self._keep: tuple[object, ...] = tuple(keep)
        self._failures = tuple(failures)  # of callbacks; what they raised is what the save raises
        self._fallbacks = (*route.steps, *(Step(note, "torch") for note in notes))
        self._causes = tuple(causes)  # of failures that the library names by their codes only
        # No lock: a signal's handler may ask for it while its thread does. What follows is whole
        # between any two steps, and what must happen once is decided by taking something away.
        self._callbacks: list[Callable[[SaveHandle], object]] = []
        self._unwatched = [True]  # empty: a thread waits for its end
        #: who waits until it is copied, and what it costs them: see lazy.py
        self._waiters: tuple[Steps, ...] = ()
        self._steps: Steps | None = None
        self._hook_s = 0.0
        self._step_s: list[float] = []
        self._background = True  # nobody is waiting for it anyway
        self._asked = False  # somebody knows how it ended
        #: how it ended, once that is known: (report, error)
        self._end: dict[str, tuple[Report | None, BaseException | None]] = {}
        #: where the file goes
        self.path: str = route.path
        #: where it is written
        self._place = under_way.place_of(route.place)
        self._passage = route.passage

    @classmethod
    def ended(cls, path: str, report: Report | None, error: BaseException | None) -> SaveHandle:
        """The handle of a save that was over before it could be given."""
        handle = cls(None, None, directly(path))
        handle._end["how"] = (report, error)
        return handle

    @property
    def _ended(self) -> bool:
        return bool(self._end)

    @property
    def _report(self) -> Report | None:
        return self._end["how"][0] if self._end else None

    @property
    def _error(self) -> BaseException | None:
        return self._end["how"][1] if self._end else None

    def __repr__(self) -> str:
        state = "under way"
        if self.done():
            # Who only looks at it is not to be stopped, though warnings be errors.
            with contextlib.suppress(SkippedWarning):
                self._settle()
            skipped = self._report is not None and self._report.skipped
            state = "failed" if self._error else "skipped" if skipped else "done"
        return f"<ioshape.SaveHandle {self.path!r}: {state}>"

    # ---- Asking -------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        if self._ended or not self._mine():
            return self._ended
        code = lib.ioshape_save_wait(self._pointer, 0)
        return code != _UNDER_WAY and (bool(code) or self._is_carried(0))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the file is durable and in place, or for `timeout` seconds.

        True if it is, or was skipped (setting "full"; the report says it), False if the save is
        still under way; raises what it failed with.
        """
        if not self._wait(timeout):
            return False
        self._asked = True
        if self._error is not None:
            raise self._error
        return True

    def result(self, timeout: float | None = None) -> Report:
        """Waits, and gives the report; raises what the save failed with, or TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError(f"the save to {self.path} is still under way after {timeout} s")
        assert self._report is not None
        return self._report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits, and gives what the save failed with, or None; TimeoutError if it is under way."""
        if not self._wait(timeout):
            raise TimeoutError(f"the save to {self.path} is still under way after {timeout} s")
        self._asked = True
        return self._error

    def drained(self) -> bool:
        """Whether the file is at its destination, or one that was saved to the same path later.

        Of a save over a tier that is some time after done(); of others it is the same.
        """
        if not self.done():
            return False
        self._settle()
        passage = self._passage
        return self._error is None and (passage is None or passage.is_drained())

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Waits until it is, or for `timeout` seconds.

        True if it is, False if it is still under way. Raises what the save failed with, or why the
        last drain could not carry it; then it stays on the tier, and is tried again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if not self.wait(timeout):
            return False
        if self._passage is None or not self._passage.is_kept:  # the latter: it was skipped
            return True
        return self._passage.wait_drained(None if end is None else max(0.0, end - time.monotonic()))

    @property
    def report(self) -> Report | None:
        """What the save did, also if it failed; None while it is under way."""
        if self.done():
            self._settle()
        return self._report

    @property
    def progress(self) -> Progress:
        """What the save is doing."""
        if self._ended and self._pointer == ffi.NULL:
            written = self._report.file_bytes if self._report else 0
            return Progress("done", written, written)
        self._check_owner()
        now, place = sized("ioshape_save_status"), sized("ioshape_place")
        lib.ioshape_save_get_status(self._pointer, now, place)
        name = PHASES.get(now.phase, "unknown")
        if name == "done" and self._passage is not None:
            name = "drain"  # or in the instant before its end
        if name != "wait":
            return Progress(name, now.done_bytes, now.total_bytes)
        there = (place.position, said(place.ahead), place.waited_s)
        return Progress(name, now.done_bytes, now.total_bytes, *there)

    def cancel(self) -> bool:
        """Aborts the save unless it has ended: no file is left, and the previous one stays.

        True if the save has not put its file in place. It then raises CanceledError when asked.
        """
        self._check_owner()
        if self._ended:
            return self._error is not None
        lib.ioshape_save_cancel(self._pointer)
        if self._passage is not None:
            self._passage.give_up()
        self._wait(None)
        self._asked = True
        return self._error is not None

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Calls callback(handle) when the save has ended: now, or on a thread of the package."""
        self._check_owner()
        self._callbacks.append(callback)
        if self._ended:
            self._call_all()
        else:
            self._watch()

    def __await__(self) -> Generator[Any, None, Report]:
        import asyncio  # noqa: PLC0415 - not quick to import

        loop = asyncio.get_running_loop()
        future: asyncio.Future[Report] = loop.create_future()

        def deliver() -> None:
            if future.cancelled():
                return
            self._asked = True
            if self._error is not None:
                future.set_exception(self._error)
            else:
                assert self._report is not None
                future.set_result(self._report)

        def ended(_handle: SaveHandle) -> None:
            # A loop that was closed has nobody waiting in it any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver)

        self.add_done_callback(ended)
        return (yield from future)

    # ---- Inside -------------------------------------------------------------------------------

    def _mine(self) -> bool:
        return self._owner == os.getpid()

    def _check_owner(self) -> None:
        if not self._mine():
            raise failure(
                -1,
                f'the save to "{self.path}" belongs to another process',
                self.path,
                "save",
                remedy="ask for it there, not after a fork",
            )

    def _wait(self, timeout: float | None) -> bool:
        """Waits until it has ended. Ctrl-C gets through."""
        if self._ended:
            return True
        self._check_owner()
        end = None if timeout is None else time.monotonic() + timeout
        shows = not under_way.is_ending() and _terminal.can_show()
        try:
            while True:
                left_ms = _SLICE_MS
                if end is not None:
                    left_ms = max(0, min(_SLICE_MS, int((end - time.monotonic()) * 1000) + 1))
                code = lib.ioshape_save_wait(self._pointer, left_ms)
                if code != _UNDER_WAY:
                    break
                if end is not None and time.monotonic() >= end:
                    return False
                if shows:
                    self._show_waiting()
        finally:
            if shows:
                _terminal.set_waiting(False)
        if not code and not self._is_carried(None if end is None else end - time.monotonic()):
            return False
        self._settle()
        return True

    def _is_carried(self, timeout: float | None) -> bool:
        """Of a save that has ended well: whether it also is where its caller wants it, in time."""
        if self._passage is None:
            return True
        self._passage.keep()
        return self._passage.has_ended(timeout)

    def _wait_copied(self) -> None:
        """Waits until what it saves may change."""
        if self._ended or not self._mine():
            return
        begin = time.perf_counter()
        lib.save_wait_copied(self._pointer)
        self._hook_s += time.perf_counter() - begin

    def _show_waiting(self) -> None:
        """Says on the terminal what a long wait is for."""
        now = self.progress
        _terminal.set_waiting(now.phase == "wait")
        if now.phase == "wait" and now.waited_s >= _LONG_S:
            place = f"{now.position} ahead" if now.position else "the next"
            _terminal.show(
                "waiting for a slot to write ", self.path, f": {place}, {now.waited_s:.0f} s"
            )

    def _settle(self) -> None:
        """Notes how it ended, once. Only after it has."""
        failures, causes = self._failures, self._causes
        if self._ended:
            return
        code = lib.ioshape_save_wait(self._pointer, 0)
        struct = sized("ioshape_report")
        lib.ioshape_save_get_report(self._pointer, struct)
        report = from_struct(
            self.path,
            struct,
            pickle_s=self._pickle_s,
            hook_s=self._hook_s,
            step_slowdown=self._steps.slowdown(self._step_s) if self._steps else None,
            fallbacks=self._fallbacks,
            skipped=code == lib.IOSHAPE_E_SKIPPED,
        )
        # A save that is skipped has not failed: training goes on.
        failed = bool(code) and not report.skipped
        passage = self._passage
        if passage is not None and not code:
            report = replace(
                report,
                tier=passage.folder,
                drain_s=passage.drain_s,
                total_s=report.total_s + passage.drain_s,
                fallbacks=(*report.fallbacks, *passage.steps()),
            )
            failed = passage.failure is not None
            failures = (*failures, passage)
        error = self._exception(report, failures, causes) if failed else None
        how = (report, error)
        # Who comes second goes by what the first has found.
        if self._end.setdefault("how", how) is not how:
            return
        # What was borrowed goes now, however long the user keeps this object.
        self._keep = ()
        self._failures = ()
        self._causes = ()
        self._context = None
        # Only afterwards may the process end.
        try:
            trace.record(report, background=self._background, error=error)
            self._call_all()
        finally:
            under_way.forget(self)
        # Last: a filter of the program's may make an exception of it.
        if report.skipped:
            self._warn(report)

    def _warn(self, report: Report) -> None:
        why = report.fallbacks[-1] if report.fallbacks else "skipped"
        if under_way.is_ending() or under_way.is_calling_back():
            # Nobody's call: there is no place in the program to warn of, nor to raise an exception.
            with contextlib.suppress(SkippedWarning):
                warn_skipped(self.path, why)
        else:
            warn_skipped(self.path, why)

    def _call_all(self) -> None:
        """Each of them once, whoever else calls this at the same time."""
        interrupt: BaseException | None = None
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                break
            try:
                self._call(callback)
            except BaseException as error:  # Ctrl-C: the others are called all the same
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _call(self, callback: Callable[[SaveHandle], object]) -> None:
        try:
            callback(self)
        except Exception:  # the save has nothing to do with it
            sys.excepthook(*sys.exc_info())

    def _exception(
        self, report: Report, failures: Iterable[Any], causes: Iterable[Cause]
    ) -> BaseException:
        for source in failures:
            if source.failure is not None:
                if isinstance(source.failure, StorageError):
                    source.failure.report = report
                return source.failure  # type: ignore[no-any-return]
        lib.ioshape_save_wait(self._pointer, 0)  # so that this thread is told
        error = last_failure(self.path, "save")
        error.report = report
        error.__cause__ = next(filter(None, (one.cause() for one in causes)), None)
        return error

    def _watch(self) -> None:
        """Sees to it that callbacks are called when the save ends."""
        try:
            self._unwatched.pop()
        except IndexError:
            return
        threading.Thread(target=self._watch_it, name="ioshape", daemon=True).start()

    def _watch_it(self) -> None:
        under_way.calls_back()
        # Who waits hurries the copying, and nobody waits yet.
        while self._waiters and self.progress.phase == "stage":
            time.sleep(_SLICE_MS / 1000)
        self._wait(None)

    def _abort(self) -> None:
        """As cancel(), for what Ctrl-C interrupted: nobody will ask."""
        self._asked = True
        self.cancel()
