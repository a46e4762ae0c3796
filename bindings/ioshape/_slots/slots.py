# SPDX-License-Identifier: Apache-2.0
"""Slots for programs that write by themselves."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
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

# pace() passes bytes in pieces, as Python looks for signals only in its own code: so large that a
# piece waits for about so long.
_PATIENCE_S = 0.2
_FIRST_PIECE = 4 << 10
_MOST_PIECE = 4 << 20


def failure_of(subject: str, operation: str, *, code: int | None = None) -> Exception:
    """The library's sentence, with nothing secret in it, also where the name is an address.

    `code`: of the exception, where that is not the library's.
    """
    facts = last_facts(without_password(subject), operation)
    return raised_for(facts if code is None else facts._replace(code=code))


class Place(NamedTuple):
    """Where a request for a slot stands in the queue."""

    #: requests that are ahead of it: at 0 it is the next
    position: int
    #: who goes before it, or holds a slot, such as "job 4711, rank 7 on n03"
    ahead: str
    #: slots of the pool; 0 if that is not known
    capacity: int
    #: so far
    waited_s: float
    #: "" without coordination
    pool: str
    #: "redis", "local"; "unreachable" while it does not answer
    coordinator: str


@dataclass(frozen=True)
class SlotInfo:
    """How a slot was acquired."""

    #: "" without coordination
    pool: str
    #: "redis", "local", "open" (nobody keeps an order), or without a slot "stagger": it was
    #: unreachable, or "deadline": there was no more time
    coordinator: str
    #: rises with every grant of the pool; 0 without coordination
    fence: int
    #: for the slot
    waited_s: float
    #: for bandwidth, so far
    paced_s: float
    #: its place in the queue when it began to wait, from 1 on; 0: it did not wait
    position: int
    #: who was; "" if nobody
    ahead: str
    #: slots of the pool; 0 if that is not known
    capacity: int
    #: whether it is not held any more although it was not released
    lost: bool
    #: whether it was so small that it was let past the queue
    express: bool
    #: what was not as preferred, and why; "" if nothing
    note: str


class Slot:
    """The right to write now, as ioshape.slot() gives it. The end of its `with` block releases it.

    A slot is for speed and for the neighbours, never for correctness: nothing breaks if it is lost.
    """

    def __init__(self, context: Context, slot: Any) -> None:
        # A pointer to the pointer. When it goes, so does the slot.
        self._slot = slot
        self._context = context
        self._owner = os.getpid()
        self._passing = threading.Lock()  # while a piece is passed; taken before the other
        self._lock = threading.Lock()
        self._piece = _FIRST_PIECE
        self._ending = False  # or released
        self._last: SlotInfo | None = None  # when it was released

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
        """Says that so many bytes are about to be written. To be called before each piece.

        It waits as long as the bandwidth set for the job or the pool asks for. It also shows that
        the work goes on: a slot that moves nothing for two minutes is taken to hang, and is
        given to the next. One thread at a time. Ctrl-C, or release() by another thread, ends it
        soon, though not within the same instant.
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
            if took_s > _PATIENCE_S:
                self._piece = max(1, min(piece, int(piece * _PATIENCE_S / took_s)))
            elif piece == self._piece:
                self._piece = min(2 * piece, _MOST_PIECE)
            left -= piece
            if left <= 0:
                return

    @property
    def info(self) -> SlotInfo:
        """How it was acquired, and whether it is still held."""
        self._check_owner()
        with self._lock:
            return self._last or self._read()

    @property
    def lost(self) -> bool:
        """Whether it is not held any more although it was not released.

        The process was stopped or moved nothing for too long, an operator took it away, or the
        coordinator lost its data. To go on writing is allowed.
        """
        return self.info.lost

    @property
    def released(self) -> bool:
        """Whether it has been given back."""
        return self._last is not None

    def release(self) -> None:
        """Gives it to the next in the queue. A second time it does nothing.

        As soon as the bytes are on stable storage: until then they load the storage.
        """
        if self._owner != os.getpid():
            return  # the parent still holds it
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
                remedy="take one after the fork",
            )

    def _check(self, code: int) -> None:
        if code:
            raise last_failure("", "slot")

    def _read(self) -> SlotInfo:
        struct = sized("ioshape_slot_info")
        self._check(lib.ioshape_slot_get_info(self._slot[0], struct))
        return SlotInfo(**shared_fields(SlotInfo, struct, flags=frozenset({"lost", "express"})))


class _Queue:
    """Takes the callback of who waits to C. An exception in it gives up and is kept."""

    def __init__(self, callback: Callable[[Place], object] | None) -> None:
        self.callback = callback
        self.failure: BaseException | None = None

    def tell_place(self, place: Any) -> None:
        """What the library calls."""
        if self.callback is not None:
            self.callback(
                Place(
                    position=place.position,
                    ahead=said(place.ahead),
                    capacity=place.capacity,
                    waited_s=place.waited_s,
                    pool=said(place.pool),
                    coordinator=said(place.coordinator),
                )
            )


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
    """Waits for a slot, for programs that write by themselves. Saves wait for theirs anyway.

        with ioshape.slot("/scratch/run7", nbytes=len(data)) as slot:
            slot.pace(len(data))
            file.write(data)
            os.fsync(file.fileno())

    Args:
        path: a file or folder of the filesystem that is going to be written to; the last part of it
            need not exist. The pool is named after the filesystem, unless the setting "pool" names
            one.
        pool: the name of the pool, instead of a path.
        weight: how many slots it takes. More than the pool has: it writes alone.
        nbytes: that are going to be written; 0 if unknown. For fairness, and small ones wait less.
        timeout: in seconds; 0 never waits. Default: no limit.
        progress: is called with a Place about ten times a second while it waits; an exception in it
            gives up. It must not call ioshape.
        deadline: seconds until the process will end, as in save(). If no slot comes free in time,
            the one that is returned is none: write without it.

    Returns:
        A Slot, to be used in a `with` statement, or released by its release().

    Raises:
        TimeoutError: no slot came free in that time.
        CoordinatorError: the coordinator is unreachable, and the setting "unreachable" is "fail".
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
        # Python looks for signals only in its own code: with it, Ctrl-C ends the waiting.
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
            # A slot that is not free at once is to Python one that did not come free in time.
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
    """The library looks at the folder that a path is in. Of a folder itself, that is meant."""
    return encoded(os.path.join(path, "") if os.path.isdir(path) else path)  # noqa: PTH112, PTH118


def pool_name_in(context: Context, path: str) -> str:
    """The pool that saves to this path take their slots from.

    It is the setting "pool", or made of the filesystem that the path is on, so that all jobs that
    share that meet in it. The last part of the path need not exist.
    """
    name = ffi.new("char[]", _NAME_BYTES)
    code = lib.save_pool_of_path(context.pointer, _inside(path), name, _NAME_BYTES)
    if code:
        raise failure_of(path, "pool_name")
    return said(name)
