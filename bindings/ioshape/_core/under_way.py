# SPDX-License-Identifier: Apache-2.0
"""All saves under way: failures that nobody has heard of, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from ioshape._core import terminal as _terminal
from ioshape._core.errors import StorageError
from ioshape._core.locks import ForkedLock
from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._core.context import Context
    from ioshape._core.report import Report
    from ioshape._save.handle import SaveHandle

#: Of a process that lost a save and would have ended with 0. Launchers and schedulers must see it.
LOST_STATUS = os.EX_IOERR

_registry_lock = ForkedLock()
_under_way: dict[int, SaveHandle] = {}
_unheard: list[SaveHandle] = []
_starting = 0  # saves that are about to be under way
_ending = False  # the process is waiting for all of them, or has waited
_ended = False  # it has waited
_interrupted = False  # Ctrl-C has ended that wait; tests that leave a tier undrained set it
#: .calling: this thread is there to call the users' callbacks; .staged: see staging()
_ours = threading.local()
_finishing_in = -1  # the process that multiprocessing has been told of


@contextlib.contextmanager
def staging(path: str) -> Iterator[None]:
    """Around the call that copies what is saved to this path into staging memory."""
    before = paths_staged()
    _ours.staged = (*before, place_of(path))
    try:
        yield
    finally:
        _ours.staged = before


def paths_staged() -> tuple[str, ...]:
    """Where those saves go that this thread is staging.

    Not empty in the handler of a signal that has interrupted it. Until the handler returns such a
    save goes no further: who waited for its staging memory, or for its file, would wait for ever.
    """
    return getattr(_ours, "staged", ())


def is_ending() -> bool:
    """Whether the process is at its end."""
    return _ending


def calls_back() -> None:
    """Notes that this thread is there to call the users' callbacks."""
    _ours.calling = True


def is_calling_back() -> bool:
    """Whether this thread is."""
    return getattr(_ours, "calling", False)


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
        is_main = threading.current_thread() is threading.main_thread()
        if _ending and not (is_main or is_calling_back()):
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
            end_nonzero()


def begun(begin: Callable[[], SaveHandle]) -> SaveHandle:
    """A save that goes on in the background."""
    with starting():
        handle = begin()
        register(handle, background=True)
    if handle._passage is not None:
        handle._watch()  # somebody must keep it
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


def all_under_way() -> list[SaveHandle]:
    """Saves that have not ended, as far as anybody has noticed."""
    return list(_under_way.values())


def forget(handle: SaveHandle) -> None:
    """Of a save that has ended; its failure stays until somebody hears of it."""
    with _registry_lock:
        known = _under_way.pop(id(handle), None) is not None
        if known and handle._background and handle._error is not None:
            _unheard.append(handle)


def context_of_saves_to(path: str) -> Context | None:
    """The context of a save under way to this path, if there is one."""
    if not _under_way:
        return None
    place = place_of(path)
    for handle in list(_under_way.values()):
        context = handle._context
        if context is not None and handle._place == place:
            return context
    return None


def place_of(path: str) -> str:
    """What tells files apart, as the library does: the name in a directory, however written."""
    directory, name = os.path.split(path)
    return os.path.join(os.path.realpath(directory or "."), name)  # noqa: PTH118


def raise_unheard(*, but: SaveHandle | None = None) -> None:
    """Raises the first failure of a background save that nobody has asked about."""
    for handle in list(_under_way.values()):
        if handle is not but and handle.done():
            handle._settle()
    for handle in list(_unheard):
        if handle is but:
            continue
        asked, handle._asked = handle._asked, True
        _hear(handle)
        if not asked:
            assert handle._error is not None
            raise handle._error


def _hear(handle: SaveHandle) -> None:
    """Its failure is known now. (Another thread, or a signal's handler, may have been quicker.)"""
    with contextlib.suppress(ValueError):
        _unheard.remove(handle)


def wait_all(timeout: float | None = None) -> bool:
    """Waits for all background saves; raises what the first of them that failed failed with.

    False if some are still under way after `timeout` seconds.
    """
    end = None if timeout is None else time.monotonic() + timeout
    for handle in [one for one in list(_under_way.values()) if one._background]:
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
    handles = list(_under_way.values())
    # Those that have ended are here until their callbacks have been called.
    left = [handle for handle in handles if not handle._wait(0)]
    with _registry_lock:
        _ended = not _under_way and not _starting
        return None if _ended else left


def _wait_at_exit() -> None:
    """Waits for all saves."""
    begin = time.monotonic()
    next_word = begin + 1.0
    while (left := _left()) is not None:
        now = time.monotonic()
        if now >= next_word and left:
            _terminal.say(f"finishing before the program ends: {_tell_progress(left)}")
            next_word = now + (5.0 if now - begin > 5 else 2.0)
        if left:
            left[0]._wait(max(0.01, min(0.5, next_word - now)))
        else:
            time.sleep(0.01)


def _abort_all(handles: list[SaveHandle]) -> bool:
    """Whether one of them is lost: others may have got through after all."""
    global _ended  # noqa: PLW0603
    with _registry_lock:
        _ended = True
    lost = [handle for handle in handles if handle.cancel()]
    for handle in lost:
        _terminal.say(
            f'cannot finish the save to "{handle.path}": interrupted; the previous file stands'
        )
    return bool(lost)


_after_saves: list[Callable[[], object]] = []


def after_saves(function: Callable[[], object]) -> Callable[[], object]:
    """Has the end of the process call this, when saves under way are finished."""
    _after_saves.append(function)
    return function


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
            end_nonzero()
        for function in _after_saves:
            function()


def was_interrupted() -> bool:
    """Return whether Ctrl-C has ended the wait for saves: nothing else is waited for then."""
    return _interrupted


def _finish_saves() -> bool:
    """Whether one was given up."""
    global _interrupted  # noqa: PLW0603
    try:
        _wait_at_exit()
    except KeyboardInterrupt:
        _interrupted = True
        return _abort_all(_left() or [])
    return False


def _tell_unheard() -> bool:
    """Prints the failures that nobody has asked about; whether there were any."""
    unheard = [handle for handle in list(_unheard) if not handle._asked]
    for handle in unheard:
        _hear(handle)
        if isinstance(handle._error, StorageError):
            _terminal.say(f"a save in the background failed: {handle._error}")
        else:
            _terminal.say(
                f'the save to "{handle.path}" failed in the background: {handle._error!r}'
            )
    return bool(unheard)


# ---- The exit status -------------------------------------------------------------------------


def end_nonzero() -> None:
    """Has the process end with another status than 0."""
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
