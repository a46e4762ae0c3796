# SPDX-License-Identifier: Apache-2.0
"""SaveHandle: the caller's object for a save in the background."""

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
from ioshape._core.errors import (
    SkippedWarning,
    StorageError,
    failure,
    last_failure,
    warn_skipped,
)
from ioshape._core.report import ALARMS, CODES, FLAGS, PHASES, Downgrade, Progress, Report
from ioshape._core.structs import said, shared_fields, sized
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from typing import Protocol

    from ioshape._core.context import Context
    from ioshape._save.lazy import Steps
    from ioshape._save.request import SaveRequest

    class Cause(Protocol):
        """An object that knows more about a failure than its code."""

        def cause(self) -> BaseException | None:
            """Return the exception that it met, or None."""


# Milliseconds of one wait in the library. Python handles signals such as Ctrl-C between two waits.
_SLICE_MS = 50

# Seconds of waiting for a slot after which the library logs the wait and a terminal shows it.
_LONG_S = 5.0

_UNDER_WAY = -errno.EINPROGRESS


class SaveHandle:
    """A save in the background, as ioshape.save_async() returns it.

    You may keep the handle or drop it: the save goes on either way. If the save fails and the
    program never asks for the outcome, the next save raises the error. If there is no next save,
    the process prints the error at its end and exits nonzero.

    A handle can be awaited in asyncio: `report = await handle`.

    Any thread may use a handle. In a forked child a save of the parent cannot be used: most calls
    raise a StorageError.
    """

    def __init__(
        self,
        request: SaveRequest,
        save: Any = None,
        context: Context | None = None,
        *,
        pickle_s: float = 0.0,
        keep: Iterable[object] = (),
        failures: Iterable[Any] = (),
        downgrades: tuple[Downgrade, ...] = (),
        causes: Iterable[Cause] = (),
    ) -> None:
        # A pointer to the C pointer. When it is garbage-collected, the save is freed, which aborts
        # a save that has not ended.
        self._save = save
        self._pointer = save[0] if save is not None else ffi.NULL
        self._context = context
        self._owner = os.getpid()
        self._pickle_s = pickle_s
        self._keep: tuple[object, ...] = tuple(keep)
        self._failures = tuple(failures)  # callbacks; the save raises what they raised
        self._downgrades = (*request.downgrades, *downgrades)
        self._trace = request.context.trace
        self._causes = tuple(causes)  # for failures of which the library knows only a code
        # There is no lock, because a signal handler may use the handle while its thread does. The
        # fields below are consistent between any two bytecodes. What must happen once is decided by
        # removing an item from a list.
        self._callbacks: list[Callable[[SaveHandle], object]] = []
        self._unwatched = [True]  # empty if a thread waits for the end of the save
        #: steps that wait until the storages are copied, and the cost of that wait: see lazy.py
        self._waiters: tuple[Steps, ...] = ()
        self._hook_s = 0.0
        self._background = True  # the caller does not wait for it at once
        self._asked = False  # the program has learned how the save ended
        #: the outcome once it is known, under the key "how": (report, error)
        self._end: dict[str, tuple[Report | None, BaseException | None]] = {}
        #: the destination, as the caller gave it
        self.path: str = request.path
        #: the canonical path to which the save writes, which may be on a tier
        self._canonical_path = under_way.canonical(request.write_path)
        self._passage = request.passage

    @classmethod
    def ended(
        cls, request: SaveRequest, report: Report | None, error: BaseException | None
    ) -> SaveHandle:
        """Return a handle for a save that has already ended."""
        handle = cls(request)
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
            # repr() must not raise, even if the program turns warnings into errors.
            with contextlib.suppress(SkippedWarning):
                self._record_end()
            skipped = self._report is not None and self._report.skipped
            state = "failed" if self._error else "skipped" if skipped else "done"
        return f"<ioshape.SaveHandle {self.path!r}: {state}>"

    # ---- Public functions ---------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the save has ended, with or without success. Do not wait."""
        if self._ended or not self._mine():
            return self._ended
        code = lib.ioshape_save_wait(self._pointer, 0)
        return code != _UNDER_WAY and (bool(code) or self._is_carried(0))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended, for at most `timeout` seconds. None means no limit.

        Return True if the file is durable and in place. If the file did not fit and the setting
        "full" is "skip", also return True; the report has `skipped` set. Return False if the save
        is still in progress. Raise the error if the save failed.
        """
        if not self._wait(timeout):
            return False
        self._asked = True
        if self._error is not None:
            raise self._error
        return True

    def result(self, timeout: float | None = None) -> Report:
        """Wait as wait() does, and return the report.

        Raise the error if the save failed, and TimeoutError if it is still in progress after
        `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the save to {self.path} is still under way after {timeout} s")
        assert self._report is not None
        return self._report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as wait() does, and return the error of the save, or None if it succeeded.

        Raise TimeoutError if the save is still in progress after `timeout` seconds.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"the save to {self.path} is still under way after {timeout} s")
        self._asked = True
        return self._error

    def drained(self) -> bool:
        """Return whether this file, or one that a later save wrote, is at the destination.

        A save over a tier is drained some time after done(). Any other save is drained when it
        succeeds.
        """
        if not self.done():
            return False
        self._record_end()
        passage = self._passage
        return self._error is None and (passage is None or passage.is_drained())

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Wait until the file is drained, for at most `timeout` seconds. None means no limit.

        Return True if it is drained and False if that is still in progress. Raise the error if the
        save failed, or if the last attempt to drain it did. In the latter case the file stays on
        the tier, and the drain is tried again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if not self.wait(timeout):
            return False
        if self._passage is None or not self._passage.is_kept:  # not kept: the save was skipped
            return True
        return self._passage.wait_drained(None if end is None else max(0.0, end - time.monotonic()))

    @property
    def report(self) -> Report | None:
        """The report of the save, also if it failed; None while it is in progress."""
        if self.done():
            self._record_end()
        return self._report

    @property
    def progress(self) -> Progress:
        """The current phase of the save and its progress in bytes."""
        if self._ended and self._pointer == ffi.NULL:
            written = self._report.file_bytes if self._report else 0
            return Progress("done", written, written)
        self._check_owner()
        now, place = sized("ioshape_save_status"), sized("ioshape_place")
        lib.ioshape_save_get_status(self._pointer, now, place)
        name = PHASES.get(now.phase, "unknown")
        if name == "done" and self._passage is not None:
            name = "drain"  # or the save is just about to end
        if name != "wait":
            return Progress(name, now.done_bytes, now.total_bytes)
        there = (place.position, said(place.ahead), place.waited_s)
        return Progress(name, now.done_bytes, now.total_bytes, *there)

    def cancel(self) -> bool:
        """Abort the save unless it has ended, and wait for that. The previous file stays.

        Return True if the save has not put its file in place. wait() and result() then raise
        CanceledError, or the error if the save had already failed. Return False if the file is in
        place.
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
        """Call callback(handle) once, when the save has ended.

        If the save has ended, the call comes at once. Otherwise it comes on a thread of ioshape, or
        on a thread that waits for this save. An exception in a callback is printed and ignored.
        """
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
            # The loop may be closed. Then no coroutine waits in it any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver)

        self.add_done_callback(ended)
        return (yield from future)

    # ---- Internal functions -------------------------------------------------------------------

    def _mine(self) -> bool:
        return self._owner == os.getpid()

    def _check_owner(self) -> None:
        if not self._mine():
            raise failure(
                -1,
                f'the save to "{self.path}" belongs to another process',
                self.path,
                "save",
                remedy="use the handle there, not after a fork",
            )

    def _wait(self, timeout: float | None) -> bool:
        """Wait until the save has ended. Return False on timeout. Let Ctrl-C through."""
        if self._ended:
            return True
        self._check_owner()
        end = None if timeout is None else time.monotonic() + timeout
        shows = False
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
                now = self.progress
                if shows or now.phase == "wait":
                    shows = self._shows(now)
        finally:
            if shows:
                _terminal.set_waiting(False)
        if not code and not self._is_carried(None if end is None else end - time.monotonic()):
            return False
        self._record_end()
        return True

    def _is_carried(self, timeout: float | None) -> bool:
        """Return whether a save that has succeeded is also where its caller wants it.

        A save over a tier is added to the tier's journal first. With durable="destination", wait
        for the drain until the timeout.
        """
        if self._passage is None:
            return True
        self._passage.keep()
        return self._passage.has_ended(timeout)

    def _wait_copied(self) -> None:
        """Wait until the program may change what is saved, and count the time."""
        if self._ended or not self._mine():
            return
        begin = time.perf_counter()
        lib.save_wait_copied(self._pointer)
        self._hook_s += time.perf_counter() - begin

    def _shows(self, now: Progress) -> bool:
        """Show a long wait for a slot on the terminal. Return whether this thread may show it."""
        if under_way.is_ending() or not _terminal.can_show():
            return False
        _terminal.set_waiting(now.phase == "wait")
        if now.phase == "wait" and now.waited_s >= _LONG_S:
            place = f"{now.position} ahead" if now.position else "the next"
            _terminal.show(
                "waiting for a slot to write ", self.path, f": {place}, {now.waited_s:.0f} s"
            )
        return True

    def _record_end(self) -> None:
        """Record how the save ended, once. The caller makes sure that it has ended."""
        failures, causes = self._failures, self._causes
        if self._ended:
            return
        code = lib.ioshape_save_wait(self._pointer, 0)
        struct = sized("ioshape_report")
        lib.ioshape_save_get_report(self._pointer, struct)
        report = report_of(
            self.path,
            struct,
            pickle_s=self._pickle_s,
            hook_s=self._hook_s,
            downgrades=self._downgrades,
            skipped=code == lib.IOSHAPE_E_SKIPPED,
        )
        # A skipped save is no failure, so training can go on.
        failed = bool(code) and not report.skipped
        passage = self._passage
        if passage is not None and not code:
            report = replace(
                report,
                tier=passage.folder,
                drain_s=passage.drain_s,
                total_s=report.total_s + passage.drain_s,
                downgrades=(*report.downgrades, *passage.downgrades()),
            )
            failed = passage.failure is not None
            failures = (*failures, passage)
        error = self._exception(report, failures, causes) if failed else None
        how = (report, error)
        # If two threads get here, the first one's outcome counts.
        if self._end.setdefault("how", how) is not how:
            return
        # Release the borrowed memory now. The user may keep this object for long.
        self._keep = ()
        self._failures = ()
        self._causes = ()
        self._context = None
        # The process may end only after forget(), so callbacks come before it.
        try:
            if self._trace:
                trace.record(self._trace, report, background=self._background, error=error)
            self._call_all()
        finally:
            under_way.forget(self)
        # This comes last, because a warning filter of the program may turn it into an exception.
        if report.skipped:
            self._warn(report)

    def _warn(self, report: Report) -> None:
        why = report.downgrades[-1] if report.downgrades else "skipped"
        if under_way.is_ending() or under_way.is_calling_back():
            # No call of the program is at fault, so a warning would point nowhere, and an exception
            # would reach no caller.
            with contextlib.suppress(SkippedWarning):
                warn_skipped(self.path, why)
        else:
            warn_skipped(self.path, why)

    def _call_all(self) -> None:
        """Call each callback once, even if several threads are here at the same time."""
        interrupt: BaseException | None = None
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                break
            try:
                self._call(callback)
            except BaseException as error:  # such as Ctrl-C: still call the other callbacks
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _call(self, callback: Callable[[SaveHandle], object]) -> None:
        try:
            callback(self)
        except Exception:  # it must not affect the save
            sys.excepthook(*sys.exc_info())

    def _exception(
        self, report: Report, failures: Iterable[Any], causes: Iterable[Cause]
    ) -> BaseException:
        for source in failures:
            if source.failure is not None:
                if isinstance(source.failure, StorageError):
                    source.failure.report = report
                return source.failure  # type: ignore[no-any-return]
        lib.ioshape_save_wait(self._pointer, 0)  # makes it the last error of this thread
        error = last_failure(self.path, "save")
        error.report = report
        error.__cause__ = next(filter(None, (one.cause() for one in causes)), None)
        return error

    def _watch(self) -> None:
        """Start a thread that waits for the save, so that its callbacks are called. Do it once."""
        try:
            self._unwatched.pop()
        except IndexError:
            return
        threading.Thread(target=self._watch_it, name="ioshape", daemon=True).start()

    def _watch_it(self) -> None:
        under_way.calls_back()
        # A wait in the library speeds up the copying, which must stay slow while no step waits for
        # it.
        while self._waiters and self.progress.phase == "stage":
            time.sleep(_SLICE_MS / 1000)
        self._wait(None)

    def _complete(self) -> Report:
        """Wait for the save and return its report. If the wait is interrupted, cancel the save.

        The outcome counts as known, because the program has no handle to ask for it.
        """
        try:
            return self.result()
        except BaseException:  # such as Ctrl-C
            self._asked = True
            self.cancel()
            raise


def report_of(
    path: str,
    struct: Any,
    *,
    written_by: str = "ioshape",
    pickle_s: float = 0.0,
    hook_s: float = 0.0,
    downgrades: tuple[Downgrade, ...] = (),
    skipped: bool = False,
) -> Report:
    """Make a Report of the library's struct and of what only this package knows.

    The keyword arguments are fields of Report. `pickle_s` is added to the total time, and the start
    moves back by it, because the library's clock starts after pickling.
    """
    told = struct.downgrades[0 : min(struct.downgrade_count, len(struct.downgrades))]
    values = shared_fields(Report, struct, flags=FLAGS)
    del values["downgrades"]  # an array of structs
    values["alarms"] = tuple(name for bit, name in ALARMS.items() if struct.alarms & bit)
    values["total_s"] += pickle_s
    values["started_s"] = max(0.0, values["started_s"] - pickle_s)
    return Report(
        path=path,
        written_by=written_by,
        pickle_s=pickle_s,
        hook_s=hook_s,
        downgrades=(
            *downgrades,
            *(Downgrade(said(one.sentence), CODES[one.code]) for one in told),
        ),
        skipped=skipped,
        **values,
    )
