# SPDX-License-Identifier: Apache-2.0
"""Choose the way of a save: over a tier, or directly to its destination."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ioshape._core.errors import CanceledError, StorageError
from ioshape._core.locks import module_lock
from ioshape._core.log import logger
from ioshape._core.names import UNDER_WAY
from ioshape._core.report import Downgrade
from ioshape._core.under_way import canonical, context_of_saves_to
from ioshape._tier.drain import drain_of

if TYPE_CHECKING:
    from ioshape._save.request import SaveRequest
    from ioshape._tier.drain import Drain, Ticket


class Passage:
    """The way of a save over a tier: tier, journal, drain.

    `failure` is the exception that the save must raise.
    """

    def __init__(
        self,
        drain: Drain,
        copy_path: str,
        *,
        to_the_end: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> None:
        """Prepare a save to `copy_path` on a tier; with `to_the_end` it ends at the destination.

        The other arguments are those of Drain.keep().
        """
        self._drain = drain
        self._copy_path = copy_path
        self._to_the_end = to_the_end
        self._retention = (keep_last, keep_every)
        #: pointer to the C handle of the save; set when the save starts
        self.save: Any = None
        #: a later save went directly to the destination, so this one must not be drained over it
        self.is_overtaken = False
        #: a later save goes to the same path on the tier
        self.is_replaced = False
        # Any thread that asks how the save ended may be the one that keeps it; the others wait
        # until it is kept. Reentrant, because a signal handler may ask.
        self._lock = threading.RLock()
        self._ticket: Ticket | None = None
        self.failure: BaseException | None = None
        #: seconds of waiting for the drain
        self.drain_s: float = 0.0

    @property
    def folder(self) -> str:
        """The folder of the tier."""
        return self._drain.folder

    @property
    def is_kept(self) -> bool:
        """True if the save is recorded in the tier's journal."""
        return self._ticket is not None

    def keep(self) -> None:
        """Record the save in the tier's journal. Called when the save has succeeded; works once."""
        with self._lock:
            if self._ticket is not None or self.failure is not None:
                return
            if self.is_overtaken:
                self._drop()
                return
            try:
                last, every = self._retention
                self._ticket = self._drain.keep(self._copy_path, keep_last=last, keep_every=every)
            except StorageError as error:
                self.failure = error

    def _drop(self) -> None:
        """Remove the copy on the tier, which loads would take for the newest."""
        with _lock:
            if not self.is_replaced:
                Path(self._copy_path).unlink(missing_ok=True)

    def has_ended(self, timeout: float | None) -> bool:
        """Wait, after keep(), until the save counts as done; return False after the timeout."""
        if not self._to_the_end or self._ticket is None or self.failure is not None:
            return True
        begin = time.monotonic()
        try:
            if not self._drain.wait(self._ticket, timeout):
                return False
        except StorageError as error:
            self.failure = error
        finally:
            self.drain_s += time.monotonic() - begin
        return True

    def give_up(self) -> None:
        """Let the save end on the tier: its destination need not be reached any more."""
        self._to_the_end = False

    def is_drained(self) -> bool:
        """Return whether this save, or a later one, is at the destination."""
        if self._ticket is None:
            return self.is_overtaken
        return self._drain.is_drained(self._ticket)

    def wait_drained(self, timeout: float | None) -> bool:
        """Wait until the save is drained; return False after the timeout.

        Raises:
            StorageError: The last drain could not copy it.
        """
        assert self._ticket is not None
        return self._drain.wait(self._ticket, timeout)

    def downgrades(self) -> tuple[Downgrade, ...]:
        """Return the downgrades that are known now."""
        if self._ticket is None and self.is_overtaken:
            return (Downgrade("a later save went directly to the destination", "overtaken"),)
        if self._ticket is None or self._ticket.result != "newer":
            return ()
        return (Downgrade("not drained: the destination has a newer save", "tier"),)


_lock = module_lock()
#: The passages that callers can still ask for, with their destinations. Files only.
passages: WeakKeyDictionary[Passage, str] = WeakKeyDictionary()


def past_the_tier(why: str) -> Downgrade:
    """Return the downgrade of a save that does not use the tier."""
    return Downgrade(f"saved directly, not on the tier: {why}", "tier")


def directly(request: SaveRequest, why: str) -> SaveRequest:
    """Return the request of a save that does not use the tier."""
    return replace(request, downgrades=(*request.downgrades, past_the_tier(why)))


def routed(request: SaveRequest, n_bytes: int) -> SaveRequest:
    """Choose the way of a save of at most about `n_bytes` bytes. Return its request.

    A save without a tier need not call this while `passages` is empty.
    """
    chosen = _choose(request, n_bytes) if request.tier else request
    _tell_earlier(chosen)
    return chosen


def after_failure(request: SaveRequest, chosen: SaveRequest, error: StorageError) -> SaveRequest:
    """Return the request that saves directly because the tier failed.

    `chosen` is what routed() made of the request. Raise the error again if the destination failed.
    """
    passage = chosen.passage
    if passage is None or passage.is_kept or isinstance(error, CanceledError):
        raise error
    return directly(request, str(error))


def _tell_earlier(route: SaveRequest) -> None:
    """Mark earlier saves to this destination as overtaken or replaced.

    Saves to one path must end in the order of the calls, on whichever route.
    """
    destination = canonical(route.path)
    with _lock:
        for passage, other in list(passages.items()):
            if other == destination and route.passage is None:
                passage.is_overtaken = True
            elif other == destination:
                passage.is_replaced = True
        if route.passage is not None:
            passages[route.passage] = destination


def _choose(request: SaveRequest, n_bytes: int) -> SaveRequest:
    path = request.path
    why = _why_directly(path, request)
    if why:
        return directly(request, why)
    try:
        drain = drain_of(request.tier)
        copy_path = drain.tier.path_for(path, n_bytes)
    except StorageError as error:
        # A full tier is normal: its copies wait to be drained. All other failures need the
        # operator.
        if error.errno != errno.ENOSPC:
            logger().warning('saves "%s" directly: %s', path, error)
        return directly(request, str(error))
    return replace(
        request,
        write_path=copy_path,
        passage=Passage(drain, copy_path, to_the_end=request.to_destination),
        context=drain.context,
        durable=True,  # the file must survive on the tier until it is drained
    )


def _why_directly(path: str, request: SaveRequest) -> str:
    if not request.replace:
        return "whether it replaces a file is only known at its destination"
    if request.due is not None:
        return "it has a deadline, after which this node may end"
    if context_of_saves_to(path) is not None:
        return "an earlier save directly to the destination is in progress"
    if UNDER_WAY in path:
        return "it is part of a directory that is committed as a whole"
    return _why_not_drained(path, request.tier)


def _why_not_drained(path: str, folder: str) -> str:
    above = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    if os.path.commonpath((above, os.path.realpath(folder))) == os.path.realpath(folder):
        return "its destination is on the tier's disk"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return "its destination is not a regular file"
    except OSError:
        pass
    # Fail at the save, not at the drain, if the directory cannot be written.
    return "" if os.access(above, os.W_OK | os.X_OK) else "its directory is not writable"
