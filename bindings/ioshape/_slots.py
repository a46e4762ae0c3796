# SPDX-License-Identifier: Apache-2.0
"""Slots for programs that write by themselves, and what an operator sees and sets."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape import _config
from ioshape._callbacks import QUEUE
from ioshape._context import Context, current, encoded
from ioshape._errors import failure
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_NAME_BYTES = 128

# pace() passes bytes in pieces, as Python looks for signals only in its own code: so large that a
# piece waits for about so long.
_PATIENCE_S = 0.2
_FIRST_PIECE = 4 << 10
_MOST_PIECE = 4 << 20


def _said(text: Any) -> str:
    return str(ffi.string(text).decode(errors="replace")) if text else ""


def _sized(name: str) -> Any:
    struct = ffi.new(f"struct {name} *")
    struct.size = ffi.sizeof(f"struct {name}")
    return struct


def _failure(context: Context, code: int, subject: str, operation: str) -> Exception:
    """The library's sentence, with nothing secret in it, also where the name is an address."""
    sentence = ffi.string(lib.ioshape_context_message(context.pointer)).decode(errors="replace")
    sentence = sentence or ffi.string(lib.ioshape_strerror(code)).decode()
    hidden = _config.without_password
    return failure(code, hidden(sentence), hidden(subject), operation)


# ---- Slots --------------------------------------------------------------------------------------


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
    #: "redis", "local"; "away" while it is out of reach
    coordinator: str


@dataclass(frozen=True)
class SlotInfo:
    """How a slot was come by."""

    #: "" without coordination
    pool: str
    #: "redis", "local", "open" (nobody keeps an order), or "stagger": it was out of reach
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self._owner != os.getpid():
            return "<ioshape.Slot of the parent process>"
        info = self.info
        state = "released" if self.released else "lost" if info.lost else "held"
        return f"<ioshape.Slot of {info.pool or 'no pool'} ({info.coordinator}): {state}>"

    def pace(self, nbytes: int) -> None:
        """Says that so many bytes are about to be written. To be called before each piece.

        It waits as long as the bandwidth set for the job or the pool asks for. It also shows that
        the work goes on: a slot that moves nothing for the setting "stall_ms" is taken to hang, and
        is given to the next. One thread at a time. Ctrl-C, or release() by another thread, ends it
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
                self._check(lib.ioshape_slot_pass(self._slot[0], piece))
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
        """How it was come by, and whether it is still held."""
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
                "this slot belongs to the parent process; take one after the fork",
                "",
                "slot",
            )

    def _check(self, code: int) -> None:
        """Of what has no sentence of its own."""
        if code:
            reason = ffi.string(lib.ioshape_strerror(code)).decode()
            raise failure(code, f"cannot use the slot: {reason}", "", "slot")

    def _read(self) -> SlotInfo:
        struct = _sized("ioshape_slot_info")
        self._check(lib.ioshape_slot_get_info(self._slot[0], struct))
        return SlotInfo(
            pool=_said(struct.pool),
            coordinator=_said(struct.coordinator),
            fence=struct.fence,
            waited_s=struct.waited_s,
            paced_s=struct.paced_s,
            position=struct.position,
            ahead=_said(struct.ahead),
            capacity=struct.capacity,
            lost=bool(struct.lost),
            express=bool(struct.express),
            note=_said(struct.note),
        )


class _Releasing:
    """Releases a slot, and lets go of its context only then."""

    def __init__(self, context: Context) -> None:
        self._context: Context | None = context
        # At the interpreter's end this module may be gone before a slot.
        self._release = lib.ioshape_slot_release

    def __call__(self, slot: Any) -> None:
        self._release(slot[0])
        self._context = None


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
                    ahead=_said(place.ahead),
                    capacity=place.capacity,
                    waited_s=place.waited_s,
                    pool=_said(place.pool),
                    coordinator=_said(place.coordinator),
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
) -> Slot:
    """Waits for a turn to write, for programs that write by themselves. Saves take theirs anyway.

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

    Returns:
        A Slot, to be used in a `with` statement, or released by its release().

    Raises:
        TimeoutError: its turn did not come in that time.
        CoordinatorError: the coordinator is out of reach, and the setting "away" is "fail".
    """
    if pool == "":
        raise ValueError("the name of the pool is empty")
    options = _sized("ioshape_slot_options")
    keep: list[Any] = []
    if pool is not None:
        keep.append(ffi.new("char[]", pool.encode()))
        options.pool = keep[-1]
    if path is not None:
        keep.append(ffi.new("char[]", _inside(os.fspath(path))))
        options.path = keep[-1]
    options.weight = weight
    options.bytes = nbytes
    if timeout is not None:
        options.timeout_ms = max(1, math.ceil(timeout * 1000)) if timeout > 0 else -1
    queue = _Queue(progress)
    if progress is not None or threading.current_thread() is threading.main_thread():
        # Python looks for signals only in its own code: with it, Ctrl-C ends the waiting.
        keep.append(ffi.new_handle(queue))
        options.waiting = QUEUE
        options.waiting_user = keep[-1]
    context = current()
    # Owned before there is anything to own, whenever a signal comes.
    out = ffi.gc(ffi.new("struct ioshape_slot **"), _Releasing(context))
    try:
        code = lib.ioshape_slot_acquire(context.pointer, options, out)
        if queue.failure is not None:
            raise queue.failure
        if code == -errno.EAGAIN:  # to Python that is no other case
            code = -errno.ETIMEDOUT
        if code:
            raise _failure(context, code, pool or os.fsdecode(path or ""), "slot")
        return Slot(context, out)
    except BaseException:
        ffi.release(out)
        raise


def _inside(path: str) -> bytes:
    """The library looks at the folder that a path is in. Of a folder itself, that is meant."""
    return encoded(os.path.join(path, "") if os.path.isdir(path) else path)  # noqa: PTH112, PTH118


def pool_name(path: str | os.PathLike[str]) -> str:
    """The pool that saves to this path take their slots from.

    It is the setting "pool", or made of the filesystem that the path is on, so that all jobs that
    share that meet in it. The last part of the path need not exist.
    """
    return _pool_name(current(), os.fspath(path))


def _pool_name(context: Context, path: str) -> str:
    name = ffi.new("char[]", _NAME_BYTES)
    code = lib.ioshape_pool_name(context.pointer, _inside(path), name, _NAME_BYTES)
    if code:
        raise _failure(context, code, path, "pool_name")
    return _said(name)


# ---- The operator's view ------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """One that holds a slot, or waits for one."""

    id: str
    job: str
    node: str
    rank: int
    weight: int
    express: bool
    #: it said it would write; 0 if unknown
    bytes: int
    #: bytes, as of its last sign of life
    passed: int
    #: of those that hold
    fence: int
    #: held, or waited
    since_s: float
    #: until it is taken for dead, unless it gives a sign of life
    lease_s: float


@dataclass(frozen=True)
class PoolStatus:
    """A pool at one moment."""

    pool: str
    coordinator: str
    capacity: int
    #: "operator", "job" or "default"
    capacity_by: str
    #: slots, by weight
    used: int
    #: bytes per second that the operator allows; 0: any
    pool_rate: int
    #: the same for each job
    job_rate: int
    #: up to here a save may be let past the queue
    small_bytes: int
    #: so many of them at a time
    express: int
    #: since the pool began
    grants: int
    grants_last_minute: int
    #: oldest first; not all if there are many
    holders: tuple[Member, ...]
    #: the next one first; not all if there are many
    waiters: tuple[Member, ...]
    #: all of them
    holder_count: int
    #: all of them
    waiter_count: int


def _members(array: Any, count: int) -> tuple[Member, ...]:
    return tuple(
        Member(
            id=_said(one.id),
            job=_said(one.job),
            node=_said(one.node),
            rank=one.rank,
            weight=one.weight,
            express=bool(one.express),
            bytes=one.bytes,
            passed=one.passed,
            fence=one.fence,
            since_s=one.since_s,
            lease_s=one.lease_s,
        )
        for one in (array[i] for i in range(count))
    )


class Operator:
    """Asks a coordinator about its pools, and sets them."""

    def __init__(self, coordinator: str | None = None) -> None:
        """The coordinator of the settings, or another one."""
        preferred = {"coordinator": coordinator} if coordinator else {}
        self._context = Context(**preferred)

    def names(self) -> list[str]:
        """All pools that it knows."""
        out = ffi.new("char **")
        self._check(lib.ioshape_pool_names(self._context.pointer, out), "", "pools")
        names = ffi.gc(out[0], lib.ioshape_pool_names_free)
        return sorted({name for name in _said(names).split("\n") if name})

    def name_for(self, path: str) -> str:
        """The pool of a path."""
        return _pool_name(self._context, path)

    def status(self, pool: str) -> PoolStatus:
        """A pool at this moment."""
        out = ffi.new("struct ioshape_pool_status **")
        code = lib.ioshape_pool_get_status(self._context.pointer, pool.encode(), out)
        self._check(code, pool, "status")
        status = ffi.gc(out[0], lib.ioshape_pool_status_free)
        return PoolStatus(
            pool=_said(status.pool),
            coordinator=_said(status.coordinator),
            capacity=status.capacity,
            capacity_by=_said(status.capacity_by),
            used=status.used,
            pool_rate=status.pool_rate,
            job_rate=status.job_rate,
            small_bytes=status.small_bytes,
            express=status.express,
            grants=status.grants,
            grants_last_minute=status.grants_last_minute,
            holders=_members(status.holders, status.holder_listed),
            waiters=_members(status.waiters, status.waiter_listed),
            holder_count=status.holder_count,
            waiter_count=status.waiter_count,
        )

    def set(
        self,
        pool: str,
        *,
        capacity: int = 0,
        pool_rate: int = 0,
        job_rate: int = 0,
        small_bytes: int = 0,
        express: int = 0,
        clear: bool = False,
    ) -> None:
        """Sets what is not 0; `clear` first forgets all that was set."""
        settings = _sized("ioshape_pool_settings")
        settings.capacity = capacity
        settings.pool_rate = pool_rate
        settings.job_rate = job_rate
        settings.small_bytes = small_bytes
        settings.express = express
        settings.clear = clear
        code = lib.ioshape_pool_set(self._context.pointer, pool.encode(), settings)
        self._check(code, pool, "set")

    def kick(self, pool: str, member: str) -> None:
        """Takes its slot, or its place in the queue, from who has this id."""
        code = lib.ioshape_pool_kick(self._context.pointer, pool.encode(), member.encode())
        self._check(code, member, "kick")

    def _check(self, code: int, subject: str, operation: str) -> None:
        if code:
            raise _failure(self._context, code, subject, operation)
