# SPDX-License-Identifier: Apache-2.0
"""Wait for and hold slots in programs that write files themselves: ioshape.slot()."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.callbacks import QUEUE
from ioshape._core.context import Context, current, encoded
from ioshape._core.errors import failure, last_facts, last_failure, raised_for
from ioshape._core.structs import owned, said, shared_fields, sized
from ioshape._core.text import without_password
from ioshape._native import ffi, lib
from ioshape._save.request import due_in, left_ms

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME_BYTES = 128

# pace() passes the bytes to C in pieces, because Python handles signals only in its own code. A
# piece grows until it waits for about _MOST_WAIT_S seconds.
_MOST_WAIT_S = 0.2
_FIRST_PIECE = 4 << 10
_MOST_PIECE = 4 << 20


def failure_of(subject: str, operation: str, *, code: int | None = None) -> Exception:
    """Return the exception for the library's last error, with passwords in the name removed.

    Args:
        subject: The pool, path or address of the operation; an address may contain a password.
        operation: The operation that failed.
        code: The error code of the exception; default: the library's.
    """
    facts = last_facts(without_password(subject), operation)
    return raised_for(facts if code is None else facts._replace(code=code))


class Place(NamedTuple):
    """The position of a request for a slot in the queue."""

    #: requests before it in the queue; 0: it is the next
    position: int
    #: the request before it, or the holder of a slot, such as "job 4711, rank 7 on n03"
    ahead: str
    #: number of slots of the pool; 0 if that is not known
    capacity: int
    #: seconds of waiting so far
    waited_s: float
    #: name of the pool; "" without coordination
    pool: str
    #: "redis" or "local"; "unreachable" while the coordinator does not answer
    coordinator: str


@dataclass(frozen=True)
class SlotInfo:
    """The way a slot was acquired, and its state."""

    #: name of the pool; "" without coordination
    pool: str
    #: "redis"; "local"; "open": writers are not ordered. Two values mean that there is no slot:
    #: "stagger" if the coordinator was unreachable, "deadline" if no time was left
    coordinator: str
    #: number that rises with every grant of the pool; 0 without coordination
    fence: int
    #: seconds of waiting for the slot
    waited_s: float
    #: seconds of waiting for bandwidth so far
    paced_s: float
    #: position in the queue when it began to wait, from 1; 0: it did not wait
    position: int
    #: the request that was before it, or the holder of a slot; "" if there was none
    ahead: str
    #: number of slots of the pool; 0 if that is not known
    capacity: int
    #: whether the slot was taken away before it was released
    lost: bool
    #: whether the request was so small that it passed the queue
    bypass: bool
    #: the downgrade that was taken, and why; "" if there was none
    note: str

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name != "express":
                raise AttributeError(f"SlotInfo has no attribute {name!r}")
            sentence = "SlotInfo.express is now SlotInfo.bypass; the next version removes it"
            warnings.warn(sentence, DeprecationWarning, stacklevel=2)
            return self.bypass


class Slot:
    """The right to write now, which ioshape.slot() returns. Leaving its `with` block releases it.

    Slots affect speed, never correctness: no data are at risk if a slot is lost.
    """

    def __init__(self, context: Context, slot: Any) -> None:
        # Owns the pointer to the C slot: freeing it releases the slot.
        self._slot = slot
        self._context = context
        self._owner = os.getpid()
        self._passing = threading.Lock()  # held while a piece is passed; taken before _lock
        self._lock = threading.Lock()
        self._piece = _FIRST_PIECE
        self._ending = False  # releasing, or released
        self._last: SlotInfo | None = None  # the state when it was released

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        if self._owner != os.getpid():
            return "<ioshape.types.Slot of the parent process>"
        info = self.info
        state = "released" if self.released else "lost" if info.lost else "held"
        return f"<ioshape.types.Slot of {info.pool or 'no pool'} ({info.coordinator}): {state}>"

    def pace(self, nbytes: int) -> None:
        """Report that `nbytes` bytes will be written next. Call it before each piece of data.

        The method waits as long as the bandwidth limit of the job or the pool demands. It also
        proves that the program is alive: a slot that reports no bytes for two minutes goes to the
        next request. Only one thread may call it at a time. Ctrl-C, or release() in another thread,
        ends the wait after a fraction of a second.

        Args:
            nbytes: The number of bytes.

        Raises:
            ValueError: The slot has been released.
            StorageError: The slot belongs to the parent process.
        """
        self._check_owner()
        left = nbytes
        while True:
            with self._passing:
                if self._ending:
                    raise ValueError("the slot has been released")
                piece = min(left, self._piece)
                begin = time.monotonic()
                self._check(lib.ioshape_slot_pace(self._slot[0], piece))
                took_s = time.monotonic() - begin
            if took_s > _MOST_WAIT_S:
                self._piece = max(1, min(piece, int(piece * _MOST_WAIT_S / took_s)))
            elif piece == self._piece:
                self._piece = min(2 * piece, _MOST_PIECE)
            left -= piece
            if left <= 0:
                return

    @property
    def info(self) -> SlotInfo:
        """The way the slot was acquired, and whether it is still held."""
        self._check_owner()
        with self._lock:
            return self._last or self._read()

    @property
    def lost(self) -> bool:
        """True if the slot was taken away before it was released.

        That happens if the process was stopped or wrote nothing for too long, if an operator took
        the slot away, or if the coordinator lost its data. The program may go on writing.
        """
        return self.info.lost

    @property
    def released(self) -> bool:
        """True if the slot has been released."""
        return self._last is not None

    def release(self) -> None:
        """Release the slot to the next request in the queue. A second call does nothing.

        Call it as soon as the bytes are on stable storage: until then they load the storage.
        """
        if self._owner != os.getpid():
            return  # the parent holds the slot
        self._ending = True
        with self._passing, self._lock:
            if self._last is None:
                self._last = self._read()
                ffi.release(self._slot)

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise failure(
                -errno.EPERM,
                "this slot belongs to the parent process",
                "",
                "slot",
                remedy="acquire one after the fork",
            )

    def _check(self, code: int) -> None:
        if code:
            raise last_failure("", "slot")

    def _read(self) -> SlotInfo:
        struct = sized("ioshape_slot_info")
        self._check(lib.ioshape_slot_get_info(self._slot[0], struct))
        return SlotInfo(**shared_fields(SlotInfo, struct, flags=frozenset({"lost", "bypass"})))


class _Queue:
    """The receiver of the callback that C calls while a request waits.

    An exception in the callback ends the wait, and is kept in `failure`.
    """

    def __init__(self, callback: Callable[[Place], object] | None) -> None:
        self.callback = callback
        self.failure: BaseException | None = None

    def tell_place(self, place: Any) -> None:
        """Report a position in the queue to the caller's function. The library calls this."""
        if self.callback is not None:
            self.callback(Place(**shared_fields(Place, place)))


def slot(
    path: str | os.PathLike[str] | None = None,
    *,
    pool: str | None = None,
    weight: int = 1,
    nbytes: int = 0,
    timeout: float | None = None,
    progress: Callable[[Place], object] | None = None,
    deadline: float | None = None,
) -> Slot:
    """Wait for a slot, for a program that writes files itself.

    Saves wait for their slots anyway. Example:

        with ioshape.slot("/scratch/run7", nbytes=len(data)) as slot:
            slot.pace(len(data))
            file.write(data)
            os.fsync(file.fileno())

    Args:
        path: A file or folder on the filesystem that will be written; its last component need not
            exist. The pool is named after the filesystem, unless the setting "pool" names one.
        pool: The name of the pool, instead of a path.
        weight: How many slots the request takes. With more slots than the pool has, it writes
            alone.
        nbytes: The number of bytes that will be written; 0 if unknown. It is used for fairness, and
            small requests wait less.
        timeout: The longest wait in seconds; 0 never waits. Default: no limit.
        progress: Is called with a Place about ten times a second during the wait. An exception in
            it ends the wait. It must not call ioshape.
        deadline: Seconds until the process will end, as in save(). If no slot is free in time, the
            returned object holds none: write without it.

    Returns:
        A Slot, for a `with` statement or an explicit release().

    Raises:
        TimeoutError: No slot was free in time.
        CoordinatorError: The coordinator is unreachable, and the setting "unreachable" is "fail".
        ValueError: The name of the pool is empty.
    """
    if pool == "":
        raise ValueError("the name of the pool is empty")
    options = sized("ioshape_slot_options")
    keep: list[Any] = []
    if pool is not None:
        keep.append(ffi.new("char[]", pool.encode()))
        options.pool = keep[-1]
    if path is not None:
        keep.append(ffi.new("char[]", _inside(os.fspath(path))))
        options.path = keep[-1]
    options.weight = weight
    options.expected_bytes = nbytes
    if timeout is not None:
        options.timeout_ms = max(1, math.ceil(timeout * 1000)) if timeout > 0 else -1
    options.deadline_ms = left_ms(due_in(deadline))
    queue = _Queue(progress)
    if progress is not None or threading.current_thread() is threading.main_thread():
        # Python handles signals only in its own code. With a callback, Ctrl-C ends the wait.
        keep.append(ffi.new_handle(queue))
        options.waiting = QUEUE
        options.waiting_user = keep[-1]
    context = current()
    out = owned("slot", context)
    try:
        code = lib.ioshape_slot_acquire(context.pointer, options, out)
        if queue.failure is not None:
            raise queue.failure
        if code:
            # EAGAIN (no slot is free now) becomes a TimeoutError in Python, too.
            raise failure_of(
                pool or os.fsdecode(path or ""),
                "slot",
                code=-errno.ETIMEDOUT if code == -errno.EAGAIN else code,
            )
        return Slot(context, out)
    except BaseException:
        ffi.release(out)
        raise


def _inside(path: str) -> bytes:
    """Return a path whose folder is the one that the library must look at.

    The library looks at the folder that contains a path. A trailing slash makes it look at a folder
    itself.
    """
    return encoded(os.path.join(path, "") if os.path.isdir(path) else path)  # noqa: PTH112, PTH118


def pool_name_in(context: Context, path: str) -> str:
    """Return the name of the pool from which saves to this path take their slots.

    It is the setting "pool", or a name made from the filesystem of the path. Thus all jobs that
    share a filesystem use one pool. The last component of the path need not exist.
    """
    name = ffi.new("char[]", _NAME_BYTES)
    code = lib.save_pool_of_path(context.pointer, _inside(path), name, _NAME_BYTES)
    if code:
        raise failure_of(path, "pool_name")
    return said(name)
