# SPDX-License-Identifier: Apache-2.0
"""Saves under way: handles, errors that nobody waited for, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ioshape import _terminal
from ioshape._c import said, sized
from ioshape._errors import SkippedWarning, StorageError, failure, last_failure, warn_skipped
from ioshape._locks import ForkedLock
from ioshape._native import ffi, lib
from ioshape._run import trace
from ioshape._save.report import PHASES, Progress, Report, Step, from_struct
from ioshape._settings import config

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from typing import Protocol

    from ioshape._settings.context import Context

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
        path: str,
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
        self._notes = notes  # for the report
        self._causes = tuple(causes)  # of failures that the library names by their codes only
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[SaveHandle], object]] = []
        self._watched = False
        self._background = True  # nobody is waiting for it anyway
        self._asked = False  # somebody knows how it ended
        self._ended = False
        self._report: Report | None = None
        self._error: BaseException | None = None
        #: where the file goes
        self.path = path
        self._place = _place(path)

    @classmethod
    def ended(cls, path: str, report: Report | None, error: BaseException | None) -> SaveHandle:
        """The handle of a save that was over before it could be given."""
        handle = cls(None, None, path)
        handle._report, handle._error, handle._ended = report, error, True
        return handle

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
        return self._ended or (
            self._mine() and lib.ioshape_save_wait(self._pointer, 0) != _UNDER_WAY
        )

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
        if name != "wait":
            return Progress(name, now.done_bytes, now.total_bytes)
        there = (place.position, said(place.ahead), place.waited_s)
        return Progress(name, now.done_bytes, now.total_bytes, *there)

    def cancel(self) -> bool:
        """Aborts the save unless it has ended: no file is left, and the previous one stays.

        True if the save has not put its file in place. It then raises CanceledError when asked.
        """
        self._check_owner()
        with self._lock:
            if self._ended:
                return self._error is not None
        lib.ioshape_save_cancel(self._pointer)
        self._wait(None)
        self._asked = True
        return self._error is not None

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Calls callback(handle) when the save has ended: now, or on a thread of the package."""
        self._check_owner()
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                self._watch()
                return
        self._call(callback)

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
        shows = not _ending and _terminal.can_show()
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
        self._settle()
        return True

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
        with self._lock:
            if self._ended:
                return
            code = lib.ioshape_save_wait(self._pointer, 0)
            struct = sized("ioshape_report")
            lib.ioshape_save_get_report(self._pointer, struct)
            self._report = from_struct(
                self.path,
                struct,
                pickle_s=self._pickle_s,
                fallbacks=tuple(Step(note, "torch") for note in self._notes),
            )
            # A save that is skipped has not failed: training goes on.
            if code and code != lib.IOSHAPE_E_SKIPPED:
                self._error = self._exception()
            self._ended = True
            # What was borrowed goes now, however long the user keeps this object.
            self._keep = ()
            self._failures = ()
            self._causes = ()
            self._context = None
            callbacks, self._callbacks = self._callbacks, []
        # Only afterwards may the process end.
        try:
            trace.record(self._report, background=self._background, error=self._error)
            self._call_all(callbacks)
        finally:
            _forget(self)
        # Last: a filter of the program's may make an exception of it.
        if self._report.skipped:
            self._warn(self._report)

    def _warn(self, report: Report) -> None:
        why = report.fallbacks[-1] if report.fallbacks else "skipped"
        if _ending or getattr(_ours, "calling", False):
            # Nobody's call: there is no place in the program to warn of, nor to raise an exception.
            with contextlib.suppress(SkippedWarning):
                warn_skipped(self.path, why)
        else:
            warn_skipped(self.path, why)

    def _call_all(self, callbacks: list[Callable[[SaveHandle], object]]) -> None:
        interrupt: BaseException | None = None
        for callback in callbacks:
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

    def _exception(self) -> BaseException:
        for source in self._failures:
            if source.failure is not None:
                return source.failure  # type: ignore[no-any-return]
        lib.ioshape_save_wait(self._pointer, 0)  # so that this thread is told
        error = last_failure(self.path, "save")
        error.report = self._report
        error.__cause__ = next(filter(None, (one.cause() for one in self._causes)), None)
        return error

    def _watch(self) -> None:
        """Sees to it that callbacks are called when the save ends. The lock is held."""
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._watch_it, name="ioshape", daemon=True).start()

    def _watch_it(self) -> None:
        _ours.calling = True
        self._wait(None)

    def _abort(self) -> None:
        """As cancel(), for what Ctrl-C interrupted: nobody will ask."""
        self._asked = True
        self.cancel()


# ---- Saves under way -------------------------------------------------------------------------

_registry_lock = ForkedLock()
_under_way: dict[int, SaveHandle] = {}
_unheard: list[SaveHandle] = []
_starting = 0  # saves that are about to be under way
_ending = False  # the process is waiting for all of them, or has waited
_ended = False  # it has waited
_ours = threading.local()  # .calling: this thread is there to call the users' callbacks


_finishing_in = -1  # the process that multiprocessing has been told of


def _finish_with_multiprocessing() -> None:
    """Processes that multiprocessing has forked end without exit handlers, but with its own."""
    global _finishing_in  # noqa: PLW0603
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _finishing_in != os.getpid():
        _finishing_in = os.getpid()
        util.Finalize(None, _finish, exitpriority=0)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the beginning of a save: the end of the process waits for it.

    From then on only the main thread can save, in its exit handlers, and callbacks can: to other
    threads the interpreter's end comes at any moment, and would not wait for their saves.
    """
    global _starting  # noqa: PLW0603
    _finish_with_multiprocessing()
    with _registry_lock:
        if _ending and not (
            threading.current_thread() is threading.main_thread()
            or getattr(_ours, "calling", False)
        ):
            raise RuntimeError("cannot save any more: the interpreter is ending")
        _starting += 1
    try:
        yield
    finally:
        with _registry_lock:
            _starting -= 1


def register(handle: SaveHandle, *, background: bool) -> None:
    """Keeps a save until it has ended, and its failure until somebody hears of it."""
    handle._background = background
    handle._asked = not background
    with _registry_lock:
        if not handle._ended:
            _under_way[id(handle)] = handle
        elif handle._error is not None:
            _unheard.append(handle)
        ended = _ended
    if ended:
        handle._wait(None)  # nobody would, later
        if _tell_unheard():
            _end_nonzero()


def begun(begin: Callable[[], SaveHandle]) -> SaveHandle:
    """A save that goes on in the background."""
    with starting():
        handle = begin()
        register(handle, background=True)
    return handle


def completed(begin: Callable[[], SaveHandle]) -> Report:
    """A save that somebody waits for, and for whom it is aborted if that is interrupted."""
    with starting():
        handle = begin()
        register(handle, background=False)
    try:
        return handle.result()
    except BaseException:
        handle._abort()  # Ctrl-C
        raise


def _forget(handle: SaveHandle) -> None:
    with _registry_lock:
        known = _under_way.pop(id(handle), None) is not None
        if known and handle._background and handle._error is not None:
            _unheard.append(handle)


def context_of_saves_to(path: str) -> Context | None:
    """The context of a save under way to this path, if there is one."""
    if not _under_way:
        return None
    place = _place(path)
    with _registry_lock:
        for handle in _under_way.values():
            if handle._context is not None and handle._place == place:
                return handle._context
    return None


def _place(path: str) -> str:
    # As the library tells files apart: by the name in a directory, however that is written.
    directory, name = os.path.split(path)
    return os.path.join(os.path.realpath(directory or "."), name)  # noqa: PTH118


def raise_unheard(*, but: SaveHandle | None = None) -> None:
    """Raises the first failure of a background save that nobody has asked about."""
    with _registry_lock:
        ended = [handle for handle in _under_way.values() if handle is not but and handle.done()]
    for handle in ended:
        handle._settle()
    with _registry_lock:
        unheard = [one for one in _unheard if one is not but and not one._asked]
        _unheard[:] = [one for one in _unheard if one is but or one in unheard[1:]]
    if unheard:
        unheard[0]._asked = True
        assert unheard[0]._error is not None
        raise unheard[0]._error


def wait_all(timeout: float | None = None) -> bool:
    """Waits for all background saves; raises what the first of them that failed failed with.

    False if some are still under way after `timeout` seconds.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with _registry_lock:
        handles = [handle for handle in _under_way.values() if handle._background]
    for handle in handles:
        if not handle._wait(None if end is None else max(0.0, end - time.monotonic())):
            return False
    raise_unheard()
    return True


def _tell_progress(handles: list[SaveHandle]) -> str:
    lines = []
    for handle in handles:
        progress = handle.progress
        share = (
            f" {100 * progress.done_bytes // progress.total_bytes} %"
            if progress.total_bytes
            else ""
        )
        turn = f" behind {progress.ahead}" if progress.ahead else ""
        lines.append(f"{handle.path} ({progress.phase}{share}{turn})")
    return ", ".join(lines)


def _left() -> list[SaveHandle] | None:
    """Saves that have not ended; None if there is none, and there will be none."""
    global _ended  # noqa: PLW0603
    with _registry_lock:
        handles = list(_under_way.values())
    # Those that have ended are here until their callbacks have been called.
    left = [handle for handle in handles if not handle._wait(0)]
    with _registry_lock:
        _ended = not _under_way and not _starting
        return None if _ended else left


def _wait_at_exit(timeout: float | None) -> list[SaveHandle]:
    """Waits for all saves; those that are still under way after the timeout."""
    begin = time.monotonic()
    next_word = begin + 1.0
    while (left := _left()) is not None:
        now = time.monotonic()
        if timeout is not None and now - begin >= timeout:
            return left
        if now >= next_word and left:
            _terminal.say(f"finishing before the program ends: {_tell_progress(left)}")
            next_word = now + (5.0 if now - begin > 5 else 2.0)
        limit = next_word if timeout is None else min(next_word, begin + timeout)
        pause = max(0.01, min(0.5, limit - now))
        if left:
            left[0]._wait(pause)
        else:
            time.sleep(0.01)
    return []


def _abort_all(handles: list[SaveHandle], why: str) -> bool:
    """Whether one of them is lost: others may have got through after all."""
    global _ended  # noqa: PLW0603
    with _registry_lock:
        _ended = True
    lost = [handle for handle in handles if handle.cancel()]
    for handle in lost:
        _terminal.say(f'cannot finish the save to "{handle.path}": {why}; the previous file stands')
    return bool(lost)


def _at_exit(name: str) -> Any:
    """A setting; its default if it cannot be understood, which must not cost a checkpoint."""
    try:
        return config.value_of(name)
    except ValueError as error:
        _terminal.say(str(error))
        return None


_after_saves: list[Callable[[], object]] = []


def after_saves(function: Callable[[], object]) -> None:
    """Has the end of the process call this, when saves under way are finished."""
    _after_saves.append(function)


@atexit.register
def _finish() -> None:
    """The end of the process: saves under way are finished, failures told."""
    global _ending  # noqa: PLW0603
    with _registry_lock:
        _ending = True
    lost = True  # a second Ctrl-C cuts everything short
    try:
        lost = _finish_saves()
        lost = _tell_unheard() or lost
    finally:
        if lost:
            _end_nonzero()
        for function in _after_saves:
            function()


def _finish_saves() -> bool:
    """Whether one was given up."""
    timeout = _at_exit("exit_timeout_s")
    try:
        left = _wait_at_exit(timeout)
        why = f"it was not complete {timeout} s after the program's end (exit_timeout_s)"
    except KeyboardInterrupt:
        left, why = _left() or [], "interrupted"
    return _abort_all(left, why)


def _tell_unheard() -> bool:
    """Prints the failures that nobody has asked about; whether there were any."""
    with _registry_lock:
        unheard = [handle for handle in _unheard if not handle._asked]
        _unheard.clear()
    for handle in unheard:
        if isinstance(handle._error, StorageError):
            _terminal.say(f"a save in the background failed: {handle._error}")
        else:
            _terminal.say(
                f'the save to "{handle.path}" failed in the background: {handle._error!r}'
            )
    return bool(unheard)


# ---- The exit status -------------------------------------------------------------------------

#: Of a process that lost a save and would have ended with 0. Launchers and schedulers must see it.
LOST_STATUS = os.EX_IOERR


def _end_nonzero() -> None:
    lib.ioshape_py_end_with(LOST_STATUS)
    _terminal.say(f"a checkpoint is lost; an exit status of 0 becomes {LOST_STATUS}")
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # Such a process ends with os._exit() and a status that only an exception changes. The
        # lowest priority is the last to run.
        sys.modules["multiprocessing.util"].Finalize(None, _raise_status, exitpriority=-(1 << 30))


def _raise_status() -> None:
    error = sys.exc_info()[1]
    # One that the process was forked in is not one that it ends with.
    frame = error.__traceback__.tb_frame if error and error.__traceback__ else None
    ends_with = error if frame and frame.f_code.co_name == "_bootstrap" else None
    if ends_with is None or (isinstance(ends_with, SystemExit) and not ends_with.code):
        raise SystemExit(LOST_STATUS)


def _forget_in_child() -> None:
    # Saves under way are the parent's.
    global _starting, _ending, _ended  # noqa: PLW0603
    _starting = 0
    _ending = _ended = False
    _under_way.clear()
    _unheard.clear()
    lib.ioshape_py_end_with(0)


os.register_at_fork(after_in_child=_forget_in_child)
