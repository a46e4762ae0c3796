# SPDX-License-Identifier: Apache-2.0
"""Choose the way of a save: over a tier, or directly to its destination."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from ioshape._core.context import current
from ioshape._core.errors import CanceledError, StorageError
from ioshape._core.locks import module_lock
from ioshape._core.log import logger
from ioshape._core.names import UNDER_WAY
from ioshape._core.report import Downgrade
from ioshape._core.under_way import completed, context_of_saves_to, place_of
from ioshape._tier.drain import drain_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._core.context import Context
    from ioshape._core.report import Report
    from ioshape._save.handle import SaveHandle
    from ioshape._save.request import SaveRequest
    from ioshape._tier.drain import Drain, Ticket


class Route(NamedTuple):
    """The way from a save to its destination."""

    #: the destination, as the caller has written it
    path: str
    #: path that the save writes
    place: str
    #: None if the save writes the destination directly
    passage: Passage | None = None
    #: the downgrades of this choice
    downgrades: tuple[Downgrade, ...] = ()

    def context(self) -> Context:
        """Return the context for a save on this route.

        Saves to one path share a context, which keeps their order.
        """
        under_way = context_of_saves_to(self.place)
        if under_way is not None:
            return under_way
        return current() if self.passage is None else self.passage.context


class Passage:
    """The way of a save over a tier: tier, journal, drain.

    `failure` is the exception that the save must raise.
    """

    def __init__(
        self,
        drain: Drain,
        place: str,
        *,
        to_the_end: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> None:
        """Prepare a save to `place` on a tier; with `to_the_end` it ends at the destination.

        The other arguments are those of Drain.keep().
        """
        self._drain = drain
        self._place = place
        self._to_the_end = to_the_end
        self._retention = (keep_last, keep_every)
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
    def context(self) -> Context:
        """The context of the save."""
        return self._drain.context

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
                self._ticket = self._drain.keep(self._place, keep_last=last, keep_every=every)
            except StorageError as error:
                self.failure = error

    def _drop(self) -> None:
        """Remove the copy on the tier, which loads would take for the newest."""
        with _lock:
            if not self.is_replaced:
                Path(self._place).unlink(missing_ok=True)

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
# The passages that callers can still ask for, with their destinations. Files only.
_passages: WeakKeyDictionary[Passage, str] = WeakKeyDictionary()


def directly(path: str, why: str = "") -> Route:
    """Return the direct route to a path; `why` is the reason for not using the tier, if any."""
    downgrades = (Downgrade(f"saved directly, not on the tier: {why}", "tier"),) if why else ()
    return Route(path, path, downgrades=downgrades)


def route_of(
    path: str,
    n_bytes: int,
    request: SaveRequest,
) -> Route:
    """Return the route of a save to `path`, which will have at most about `n_bytes` bytes."""
    route = _choose(path, n_bytes, request)
    if _passages or route.passage is not None:
        _tell_earlier(route)
    return route


def _tell_earlier(route: Route) -> None:
    """Mark earlier saves to this destination as overtaken or replaced.

    Saves to one path must end in the order of the calls, on whichever route.
    """
    destination = place_of(route.path)
    with _lock:
        for passage, other in list(_passages.items()):
            if other == destination and route.passage is None:
                passage.is_overtaken = True
            elif other == destination:
                passage.is_replaced = True
        if route.passage is not None:
            _passages[route.passage] = destination


def _choose(path: str, n_bytes: int, request: SaveRequest) -> Route:
    if not request.tier:
        return directly(path)
    why = _why_directly(path, request)
    if why:
        return directly(path, why)
    try:
        drain = drain_of(request.tier)
        place = drain.tier.place(path, n_bytes)
    except StorageError as error:
        # A full tier is normal: its copies wait to be drained. All other failures need the
        # operator.
        if error.errno != errno.ENOSPC:
            logger().warning('saves "%s" directly: %s', path, error)
        return directly(path, str(error))
    return Route(path, place, Passage(drain, place, to_the_end=request.to_destination))


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


def completed_over(route: Route, begin: Callable[[Route], SaveHandle]) -> Report:
    """Save and wait for the result; save directly if the tier fails."""
    try:
        return completed(lambda: begin(route))
    except StorageError as error:
        if (
            route.passage is None
            or route.passage.is_kept  # then it was the destination that failed
            or isinstance(error, CanceledError)
        ):
            raise
        why = str(error)
    return completed(lambda: begin(directly(route.path, why)))
