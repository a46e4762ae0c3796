# SPDX-License-Identifier: Apache-2.0
"""The registry of all saves in progress, the failures not yet reported, and the wait at exit."""

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
from ioshape._core.locks import module_lock
from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._core.context import Context
    from ioshape._save.handle import SaveHandle

#: The exit status of a process that lost a save and would have exited with 0. Launchers and
#: schedulers must see that it failed.
LOST_STATUS = os.EX_IOERR

_registry_lock = module_lock()
_under_way: dict[int, SaveHandle] = {}
_unheard: list[SaveHandle] = []
_starting = 0  # saves that have begun to start and are not in _under_way yet
_ending = False  # the process is waiting for all saves, or has done so
_ended = False  # the process has waited for all saves
_interrupted = False  # Ctrl-C has ended that wait; tests that leave a tier undrained set it
#: .calling: this thread exists to call users' callbacks; .staged: see staging()
_ours = threading.local()
_finishing_in = -1  # the process in which multiprocessing knows _finish()


@contextlib.contextmanager
def staging(path: str) -> Iterator[None]:
    """Mark this thread, inside the block, as copying a save to `path` into staging memory."""
    before = paths_staged()
    _ours.staged = (*before, canonical(path))
    try:
        yield
    finally:
        _ours.staged = before


def paths_staged() -> tuple[str, ...]:
    """Return the paths of the saves that this thread is copying into staging memory.

    In a signal handler, the result is not empty if the signal has interrupted the copying. The
    interrupted save makes no progress until the handler returns. So a handler that waits for its
    staging memory or its file would wait for ever.
    """
    return getattr(_ours, "staged", ())


def is_ending() -> bool:
    """Return whether the process has begun to end."""
    return _ending


def calls_back() -> None:
    """Mark this thread as one that exists to call users' callbacks."""
    _ours.calling = True


def is_calling_back() -> bool:
    """Return whether this thread exists to call users' callbacks."""
    return getattr(_ours, "calling", False)


def _finish_with_multiprocessing() -> None:
    """Have multiprocessing call _finish() at the end of this process.

    Processes that multiprocessing has forked run its finalizers when they end, but no atexit
    handlers.
    """
    global _finishing_in  # noqa: PLW0603
    util = sys.modules.get("multiprocessing.util")
    if util is not None and _finishing_in != os.getpid():
        _finishing_in = os.getpid()
        util.Finalize(None, _finish, exitpriority=0)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Make the end of the process wait for a save that starts in this block.

    Once the process has begun to end, a save may start only on the main thread, in an exit handler,
    or in a callback. The interpreter does not wait for other threads, so a save of theirs could be
    cut off. Such a save raises RuntimeError.
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
    """Keep a save until it has ended, and its failure until the program learns of it."""
    handle._background = background
    handle._asked = not background
    with _registry_lock:
        if not handle._ended:
            _under_way[id(handle)] = handle
        elif handle._error is not None:
            _unheard.append(handle)
        ended = _ended
    if ended:
        handle._wait(None)  # at this point nothing later will wait for it
        if _tell_unheard():
            end_nonzero()


def all_under_way() -> list[SaveHandle]:
    """Return the saves that have not ended, or whose end has not been noticed yet."""
    return list(_under_way.values())


def forget(handle: SaveHandle) -> None:
    """Remove a save that has ended. Keep its failure until the program learns of it."""
    with _registry_lock:
        known = _under_way.pop(id(handle), None) is not None
        if known and handle._background and handle._error is not None:
            _unheard.append(handle)


def context_of_saves_to(path: str) -> Context | None:
    """Return the context of a save in progress to this path, or None if there is none."""
    if not _under_way:
        return None
    canonical_path = canonical(path)
    for handle in list(_under_way.values()):
        context = handle._context
        if context is not None and handle._canonical_path == canonical_path:
            return context
    return None


def canonical(path: str) -> str:
    """Return a canonical path that identifies a file, as the library does.

    Links in the directory are resolved. A link in the last component is not.
    """
    directory, name = os.path.split(path)
    return os.path.join(os.path.realpath(directory or "."), name)  # noqa: PTH118


def raise_unheard(*, but: SaveHandle | None = None) -> None:
    """Raise the first failure of a background save that the program has not asked about.

    `but` is a save whose failure is left alone.
    """
    for handle in list(_under_way.values()):
        if handle is not but and handle.done():
            handle._record_end()
    for handle in list(_unheard):
        if handle is but:
            continue
        asked, handle._asked = handle._asked, True
        _hear(handle)
        if not asked:
            assert handle._error is not None
            raise handle._error


def _hear(handle: SaveHandle) -> None:
    """Forget a failure, which is known now. Another thread or signal handler may have done so."""
    with contextlib.suppress(ValueError):
        _unheard.remove(handle)


def wait_all(timeout: float | None = None) -> bool:
    """Wait until all background saves of this process have ended.

    Saves over a tier count as ended when they are on the tier, unless they have
    durable="destination". Any thread may call this. Ctrl-C interrupts the wait, and the saves go
    on.

    Args:
        timeout: The most seconds to wait. None, the default, means no limit.

    Returns:
        True if all have ended; False if some are still in progress after `timeout` seconds.

    Raises:
        StorageError: A background save failed and the program has not asked about it yet. If
            several have failed, each call raises the next of these errors.
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
    """Return the saves that have not ended, or None once there is none and none can start."""
    global _ended  # noqa: PLW0603
    handles = list(_under_way.values())
    # A save stays in _under_way until its callbacks have been called.
    left = [handle for handle in handles if not handle._wait(0)]
    with _registry_lock:
        _ended = not _under_way and not _starting
        return None if _ended else left


def _wait_at_exit() -> None:
    """Wait for all saves. After one second, print every few seconds what the wait is for."""
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
    """Cancel these saves. Return whether one is lost, because some may have completed after all."""
    global _ended  # noqa: PLW0603
    with _registry_lock:
        _ended = True
    lost = [handle for handle in handles if handle.cancel()]
    for handle in lost:
        _terminal.say(
            f'cannot finish the save to "{handle.path}": interrupted; the previous file is '
            "unchanged"
        )
    return bool(lost)


_after_saves: list[Callable[[], object]] = []


def after_saves(function: Callable[[], object]) -> Callable[[], object]:
    """Have the end of the process call this function after all saves have ended. Return it."""
    _after_saves.append(function)
    return function


@atexit.register
def _finish() -> None:
    """Finish all saves at the end of the process, and report failures."""
    global _ending  # noqa: PLW0603
    with _registry_lock:
        _ending = True
    lost = True  # stays if a second Ctrl-C interrupts the following
    try:
        lost = _finish_saves()
        lost = _tell_unheard() or lost
    finally:
        if lost:
            end_nonzero()
        for function in _after_saves:
            function()


def was_interrupted() -> bool:
    """Return whether Ctrl-C has ended the wait for saves. Nothing else waits after that."""
    return _interrupted


def _finish_saves() -> bool:
    """Wait for all saves. On Ctrl-C, cancel them. Return whether one was lost."""
    global _interrupted  # noqa: PLW0603
    try:
        _wait_at_exit()
    except KeyboardInterrupt:
        _interrupted = True
        return _abort_all(_left() or [])
    return False


def _tell_unheard() -> bool:
    """Print the failures that the program has not asked about. Return whether there were any."""
    unheard = [handle for handle in list(_unheard) if not handle._asked]
    for handle in unheard:
        _hear(handle)
        if isinstance(handle._error, StorageError):
            _terminal.say(f"a background save failed: {handle._error}")
        else:
            _terminal.say(
                f'the save to "{handle.path}" failed in the background: {handle._error!r}'
            )
    return bool(unheard)


# ---- The exit status -------------------------------------------------------------------------


def end_nonzero() -> None:
    """Make the process exit with LOST_STATUS instead of 0."""
    lib.ioshape_py_end_with(LOST_STATUS)
    _terminal.say(f"a checkpoint is lost; an exit status of 0 becomes {LOST_STATUS}")
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # A process of multiprocessing ends by os._exit(), and only an exception changes its status.
        # The finalizer with the lowest priority runs last.
        sys.modules["multiprocessing.util"].Finalize(None, _raise_status, exitpriority=-(1 << 30))


def _raise_status() -> None:
    error = sys.exc_info()[1]
    # The exception may be one that was being handled when the process was forked. Only an exception
    # that reached multiprocessing's _bootstrap() ends this process.
    frame = error.__traceback__.tb_frame if error and error.__traceback__ else None
    ends_with = error if frame and frame.f_code.co_name == "_bootstrap" else None
    if ends_with is None or (isinstance(ends_with, SystemExit) and not ends_with.code):
        raise SystemExit(LOST_STATUS)


def _forget_in_child() -> None:
    # Saves in progress belong to the parent.
    global _starting, _ending, _ended  # noqa: PLW0603
    _starting = 0
    _ending = _ended = False
    _under_way.clear()
    _unheard.clear()
    lib.ioshape_py_end_with(0)


os.register_at_fork(after_in_child=_forget_in_child)
