# SPDX-License-Identifier: Apache-2.0
"""The tiers that this process uses, and the thread for each that drains it."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from ioshape._core import config, under_way
from ioshape._core import terminal as _terminal
from ioshape._core.context import Context, current
from ioshape._core.errors import CanceledError, StorageError, failure
from ioshape._core.locks import ForkedLock
from ioshape._tier.tier import Stop, Tier, is_tier

if TYPE_CHECKING:
    from ioshape._tier.tier import Drained, Result

# What another process has drained is looked for so often, while somebody waits.
_LOOK_S = 0.25
# After a drain that failed the next one begins so much later, or when something is saved; each time
# twice as late. What waits for other nodes is looked at sooner.
_RETRY_S, _LATEST_RETRY_S = 5.0, 300.0
_WAIT_S, _LATEST_WAIT_S = 0.5, 15.0
# An aborted drain ends between two blocks; storage that hangs is left alone.
_STOP_S = 5.0
# The least share of a pool: direct saves go first.
_SHARE = 1
_ANY_RATE = config.SETTINGS["rate"].most
_MOST_POOL_BYTES = config.SETTINGS["pool"].most


# Which one a path leads to: another disk may be mounted there since, or none.
_Folder = tuple[int, int]


def drain_context(*, rate: int | None = None) -> Context:
    """Open the context of a drain: where a Redis counts shares, saves go first."""
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
    """What this process has saved for one destination, until it is drained."""

    def __init__(self, folder: _Folder | None, place: str) -> None:
        self.folder = folder
        self.place = place
        #: how often it was kept: the last one counts, which overtakes those before
        self.keeps = 0
        self.is_drained = False
        #: of the last drain; None: it has not ended, or another process has done it
        self.result: Result | None = None
        self.failure: StorageError | None = None


class Drain:
    """A tier as this process uses it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._made: tuple[Tier, _Folder | None, int] | None = None
        self._context: tuple[Context, int] | None = None
        # Reentrant: the handler of a signal may save.
        self._changed = threading.Condition()
        self._tickets: dict[str, Ticket] = {}
        self._wanted = threading.Event()
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        #: how many drains have failed
        self._failures = 0

    @property
    def tier(self) -> Tier:
        """By the settings of now, and what the folder leads to now. Raises StorageError."""
        now = (_folder_at(self.folder), config.generation())
        if self._made is None or self._made[1:] != now:
            tier = Tier(drain_context(), self.folder)
            self._made = (tier, *now)
        return self._made[0]

    # ---- Saves ------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """For saves on it: what rations the shared storage is nothing to this node's disk."""
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
        now = config.generation()
        if self._context is None or self._context[1] != now:
            self._context = (Context(**preferred), now)
        return self._context[0]

    def keep(self, place: str, *, keep_last: int = 0, keep_every: int = 0) -> Ticket:
        """Notes what was saved at that place of the tier, durably; it is drained soon.

        Args:
            place: as Tier.place() gave it.
            keep_last: as in Tier.keep().
            keep_every: the same.

        Raises:
            StorageError: it is not noted.
        """
        tier = self.tier
        tier.keep(place.removeprefix(tier.files), keep_last=keep_last, keep_every=keep_every)
        return self.kept(place)

    def kept(self, place: str) -> Ticket:
        """The same for what is noted already."""
        folder = _folder_at(self.folder)
        with self._changed:
            ticket = self._tickets.get(place)
            if ticket is None or ticket.folder != folder:
                ticket = self._tickets[place] = Ticket(folder, place)
            ticket.keeps += 1
            ticket.result = ticket.failure = None
        self.begin()
        return ticket

    def begin(self) -> None:
        """Has the thread drain what waits, whoever has saved it."""
        self._wanted.set()
        if self._thread is None:
            self._thread = thread = threading.Thread(target=self._run, name="ioshape", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending
                self._thread = None

    def begin_once(self) -> None:
        """The same, unless the thread is there and has seen to it."""
        if self._thread is None:
            self.begin()

    def wait(self, ticket: Ticket, timeout: float | None = None) -> bool:
        """Waits until it is drained. False if it is not, in time.

        Raises:
            StorageError: the last drain could not carry it.
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
        """Whether nothing that was saved there waits any more, whichever process has carried it."""
        if not ticket.is_drained:
            self._look()
        return ticket.is_drained

    def _look(self) -> None:
        """Goes by the journal."""
        with self._changed:
            seen = {ticket: ticket.keeps for ticket in self._tickets.values()}
        if not seen:
            return
        try:
            waiting = {copy.place for copy in self.tier.copies() if copy.is_waiting}
            now = _folder_at(self.folder)
            failed = None
        except StorageError as error:
            waiting, now, failed = set(), None, error
        with self._changed:
            for ticket, keeps in seen.items():
                if failed or now != ticket.folder:
                    ticket.failure = failed or self._gone(ticket)
                elif ticket.place not in waiting and ticket.keeps == keeps:
                    ticket.is_drained = True
                    self._tickets.pop(ticket.place, None)

    def _gone(self, ticket: Ticket) -> StorageError:
        return failure(
            -errno.ENODEV,
            f'cannot drain "{ticket.place}": "{self.folder}" is another folder since it was saved',
            self.folder,
            "drain",
            remedy=f'mount what was there, and run "ioshape drain {self.folder}"',
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
            except StorageError as error:  # the log has it, and so have those who wait
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
        """Waits until what this process saved is drained, or fails; and says what is left.

        After Ctrl-C it does not wait.
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
            f'there carries them to their destinations, and so does "ioshape drain {self.folder}"'
        )


_lock = ForkedLock()
_drains: dict[str, Drain] = {}


def drain_of(folder: str) -> Drain:
    """The one of this process for that folder."""
    with _lock:
        drain = _drains.get(folder)
        if drain is None:
            drain = _drains[folder] = Drain(folder)
        return drain


def folder_to_load_from(tier: str | os.PathLike[str] | bool | None) -> str:
    """Returns config.tier_folder(), and begins to drain what an earlier process left there.

    This process may never save.
    """
    folder = config.tier_folder(tier)
    if folder and is_tier(folder):
        drain_of(folder).begin_once()
    return folder


@under_way.after_saves
def _finish() -> None:
    """The end of the process."""
    while _drains:
        _drains.popitem()[1].finish()


def _forget() -> None:
    """Threads and tiers are the parent's."""
    _drains.clear()


os.register_at_fork(after_in_child=_forget)
