# SPDX-License-Identifier: Apache-2.0
"""Keep the tiers that this process uses, each with a thread that drains it, and load from them."""

from __future__ import annotations

import errno
import glob
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ioshape._core import config, under_way
from ioshape._core import terminal as _terminal
from ioshape._core.context import Context, current
from ioshape._core.errors import (
    CanceledError,
    PassedOver,
    StorageError,
    failure,
    is_our_fault,
    warn_passed_over,
)
from ioshape._core.locks import module_lock
from ioshape._core.under_way import canonical
from ioshape._tier.tier import Stop, Tier, is_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._tier.tier import Drained, Result


# Seconds between looks for copies that another process has drained, while a caller waits.
_LOOK_S = 0.25
# Seconds until the next drain after one that failed, if no save starts it before; the pause doubles
# up to the maximum. The second pair is for checkpoints that wait for other nodes.
_RETRY_S, _LATEST_RETRY_S = 5.0, 300.0
_WAIT_S, _LATEST_WAIT_S = 0.5, 15.0
# Seconds to wait for an aborted drain. It ends between two blocks; hanging storage is left alone.
_STOP_S = 5.0
# The lowest share of a pool: direct saves go first.
_SHARE = 1
_ANY_RATE = config.SETTINGS["rate"].most
_MOST_POOL_BYTES = config.SETTINGS["pool"].most


# Device and inode of a folder. A mount or unmount can make the path lead to another folder.
_Folder = tuple[int, int]


def drain_context(*, rate: int | None = None) -> Context:
    """Open the context of a drain. If a Redis counts shares, drains get the lowest one."""
    address = config.value_of("coordinator") or "local"
    share = None if address.startswith(("local", "open")) else _SHARE
    return Context(share=share, rate=rate)


def _folder_at(path: str) -> _Folder | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Ticket:
    """A destination to which this process has saved over the tier, until it is drained."""

    def __init__(self, folder: _Folder | None, copy_path: str) -> None:
        self.folder = folder
        self.copy_path = copy_path
        #: number of saves to this destination; the last one overtakes those before
        self.keeps = 0
        self.is_drained = False
        #: result of the last drain; None if it has not ended or another process has drained the
        #: copy
        self.result: Result | None = None
        self.failure: StorageError | None = None


class Drain:
    """A tier as this process uses it, with the thread that drains it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        # Each with the values of configure() that it was made with, which change as a whole.
        self._made: tuple[Tier, _Folder | None, dict[str, Any]] | None = None
        self._context: tuple[Context, dict[str, Any]] | None = None
        # Reentrant, because a signal handler may save.
        self._changed = threading.Condition()
        self._tickets: dict[str, Ticket] = {}
        self._wanted = threading.Event()
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        #: number of drains that failed
        self._failures = 0

    @property
    def tier(self) -> Tier:
        """The open tier; opened again if the settings or the folder have changed.

        Raises:
            StorageError: The tier cannot be opened.
        """
        made, folder, given = self._made, _folder_at(self.folder), config.given
        if made is None or made[1] != folder or made[2] is not given:
            made = self._made = (Tier(drain_context(), self.folder), folder, given)
        return made[0]

    # ---- Saves ------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The context for saves to the tier.

        Limits of the shared storage (coordinator, pool, rate) do not apply to this node's disk.
        """
        preferred: dict[str, Any] = {}
        coordinator, pool = config.value_of("coordinator"), config.value_of("pool")
        if coordinator and not coordinator.startswith(("local", "open")):
            preferred["coordinator"] = "local"
        if pool:
            preferred["pool"] = f"tier-{pool}"[:_MOST_POOL_BYTES]
        if config.value_of("rate"):
            preferred["rate"] = _ANY_RATE
        if not preferred:
            return current()
        made, given = self._context, config.given
        if made is None or made[1] is not given:
            made = self._context = (Context(**preferred), given)
        return made[0]

    def keep(self, copy_path: str, *, keep_last: int = 0, keep_every: int = 0) -> Ticket:
        """Record durably what was saved on the tier, and drain it soon.

        Args:
            copy_path: The path on the tier, as Tier.path_for() returned it.
            keep_last: As in Tier.keep().
            keep_every: As in Tier.keep().

        Raises:
            StorageError: The journal could not be written.
        """
        tier = self.tier
        tier.keep(copy_path.removeprefix(tier.files), keep_last=keep_last, keep_every=keep_every)
        return self.kept(copy_path)

    def kept(self, copy_path: str) -> Ticket:
        """Drain a copy that is in the journal already, and return its ticket."""
        folder = _folder_at(self.folder)
        with self._changed:
            ticket = self._tickets.get(copy_path)
            if ticket is None or ticket.folder != folder:
                ticket = self._tickets[copy_path] = Ticket(folder, copy_path)
            ticket.keeps += 1
            ticket.result = ticket.failure = None
        self.begin()
        return ticket

    def begin(self) -> None:
        """Start or wake the thread to drain all waiting copies, also those of other processes."""
        self._wanted.set()
        if self._thread is None:
            self._thread = thread = threading.Thread(target=self._run, name="ioshape", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending
                self._thread = None

    def begin_once(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is None:
            self.begin()

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Wait until the copy is drained; return False if it is not drained in time.

        Raises:
            StorageError: The last drain could not copy it.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_drained(ticket):
            if ticket.failure is not None:
                raise ticket.failure
            left = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
            if left <= 0:
                return False
            with self._changed:
                self._changed.wait(left)
        return True

    def is_drained(self, ticket: Ticket) -> bool:
        """Return whether no copy for this destination waits, whichever process has drained it."""
        if not ticket.is_drained:
            self._look()
        return ticket.is_drained

    def _look(self) -> None:
        """Update the tickets from the journal, which shows what other processes have drained."""
        with self._changed:
            seen = {ticket: ticket.keeps for ticket in self._tickets.values()}
        if not seen:
            return
        try:
            waiting = {copy.copy_path for copy in self.tier.copies() if copy.is_waiting}
            now = _folder_at(self.folder)
            failed = None
        except StorageError as error:
            waiting, now, failed = set(), None, error
        with self._changed:
            for ticket, keeps in seen.items():
                if failed or now != ticket.folder:
                    ticket.failure = failed or self._gone(ticket)
                elif ticket.copy_path not in waiting and ticket.keeps == keeps:
                    ticket.is_drained = True
                    self._tickets.pop(ticket.copy_path, None)

    def _gone(self, ticket: Ticket) -> StorageError:
        return failure(
            -errno.ENODEV,
            f'cannot drain "{ticket.copy_path}": "{self.folder}" is a different folder than when '
            "it was saved",
            self.folder,
            "drain",
            remedy=f'mount the previous filesystem, and run "ioshape drain {self.folder}"',
        )

    # ---- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        pause: float | None = None
        while True:
            self._wanted.wait(pause)
            self._wanted.clear()
            try:
                self.tier.drain(ended=self._ended, stop=self._stop)
                pause = None
            except CanceledError:
                return
            except StorageError as error:  # logged, and raised where a caller waits
                self._failures += 1
                waits = error.errno == errno.EAGAIN
                least, most = (_WAIT_S, _LATEST_WAIT_S) if waits else (_RETRY_S, _LATEST_RETRY_S)
                pause = max(least, min(2 * pause, most)) if pause else least
            self._look()
            with self._changed:
                self._changed.notify_all()

    def _ended(self, drained: Drained) -> None:
        with self._changed:
            ticket = self._tickets.get(self.tier.files + drained.path)
            if ticket is not None:
                ticket.result, ticket.failure = drained.result, drained.error
            self._changed.notify_all()

    # ---- The end of the process -------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the copies of this process are drained or have failed; report what is left.

        After Ctrl-C this does not wait.
        """
        begin, next_word = time.monotonic(), time.monotonic() + 1.0
        try:
            while self._thread is not None and not under_way.was_interrupted():
                self._look()
                left = [one for one in self._tickets.values() if one.failure is None]
                now = time.monotonic()
                if not left:
                    break
                if now >= next_word:
                    _terminal.say(
                        f'draining the tier "{self.folder}" before the program ends: '
                        f"{len(left)} left"
                    )
                    next_word = now + (5.0 if now - begin > 5 else 2.0)
                with self._changed:
                    self._changed.wait(_LOOK_S)
        except KeyboardInterrupt:
            pass
        self._stop.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        left = list(self._tickets.values())
        if not left:
            return
        what = "1 save waits" if len(left) == 1 else f"{len(left)} saves wait"
        failures = [one.failure for one in left if one.failure is not None]
        why = f" ({failures[0].sentence})" if failures else ""
        _terminal.say(
            f'{what} on the tier "{self.folder}"{why}; the next process that saves or loads '
            f'there drains them, and so does "ioshape drain {self.folder}"'
        )


_lock = module_lock()
_drains: dict[str, Drain] = {}


def drain_of(folder: str) -> Drain:
    """Return this process's drain of that folder; create it if there is none."""
    with _lock:
        drain = _drains.get(folder)
        if drain is None:
            drain = _drains[folder] = Drain(folder)
        return drain


def folder_to_load_from(tier: str | os.PathLike[str] | bool | None) -> str:
    """Return config.tier_folder(), and begin to drain what earlier processes left there.

    A process that only loads may be the only one left to drain it.
    """
    folder = config.tier_folder(tier)
    if folder and is_tier(folder):
        drain_of(folder).begin_once()
    return folder


@under_way.after_saves
def _finish() -> None:
    """Finish all drains at the end of the process."""
    while _drains:
        _drains.popitem()[1].finish()


def _forget() -> None:
    """Forget all drains in a forked child: their threads and tiers belong to the parent."""
    _drains.clear()


os.register_at_fork(after_in_child=_forget)


# ---- The nearest copy ----------------------------------------------------------------------------
#
# Load from the nearest copy: the one on this node's tier, unless the destination is newer.

_T = TypeVar("_T")


def tier_at(folder: str) -> Tier | None:
    """Return the tier of a folder; None without a folder, or if the tier cannot be used."""
    if not folder:
        return None
    try:
        return drain_of(folder).tier
    except StorageError:
        return None


def check_tier(folder: str) -> None:
    """Raise if a tier cannot be read: an unreadable tier must not count as an empty one."""
    if not folder:
        return
    try:
        _ = drain_of(folder).tier
    except StorageError as error:
        if is_our_fault(error):
            raise


def nearest(path: str, folder: str, read: Callable[[str], _T]) -> _T:
    """Return what read() returns for the copy on the tier, or for the destination without one.

    If the copy is damaged, a FallbackWarning says so, and the destination is read.
    """
    tier = tier_at(folder)
    copy_path = None if tier is None else _found(tier, path)
    if copy_path is None:
        return read(path)
    try:
        return read(copy_path)
    except StorageError as error:
        if is_our_fault(error):
            raise
        passed_over = PassedOver(copy_path, error)
    try:
        found = read(path)
    except FileNotFoundError:
        raise passed_over.error from None
    if not isinstance(passed_over.error, FileNotFoundError):  # else drained meanwhile
        warn_passed_over(path, [passed_over])
    return found


def matching(pattern: str, folder: str) -> dict[str, str]:
    """Return the copies on the tier whose destinations match and are not newer, by destination."""
    tier = tier_at(folder)
    if tier is None:
        return {}
    behind = glob.escape(tier.files) + canonical(pattern)
    paths = [copy_path.removeprefix(tier.files) for copy_path in glob.glob(behind)]  # noqa: PTH207
    found = ((path, _found(tier, path)) for path in paths)
    return {path: copy_path for path, copy_path in found if copy_path is not None}


def _found(tier: Tier, path: str) -> str | None:
    try:
        return tier.find(path)
    except StorageError:  # no copy of this path, or the tier has changed
        return None
