# SPDX-License-Identifier: Apache-2.0
"""Which way a save goes: over a tier, or directly."""

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
from ioshape._core.locks import ForkedLock
from ioshape._core.log import logger
from ioshape._core.names import UNDER_WAY
from ioshape._core.report import Step
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
    """From a save to its destination."""

    #: the destination, as the caller has written it
    path: str
    #: where the save writes
    place: str
    #: None: that is the destination
    passage: Passage | None = None
    #: why it is not as was wanted
    steps: tuple[Step, ...] = ()

    def context(self) -> Context:
        """Of a save that takes it. Saves to one path share one, which keeps their order."""
        under_way = context_of_saves_to(self.place)
        if under_way is not None:
            return under_way
        return current() if self.passage is None else self.passage.context


class Passage:
    """A save over a tier. What it fails with the save raises: `failure`."""

    def __init__(
        self,
        drain: Drain,
        place: str,
        *,
        to_the_end: bool = False,
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> None:
        """With `to_the_end` the save ends at the destination, and not on the tier.

        The other arguments are those of Drain.keep().
        """
        self._drain = drain
        self._place = place
        self._to_the_end = to_the_end
        self._retention = (keep_last, keep_every)
        #: a later save to the destination went directly: this one must not be carried over it
        self.is_overtaken = False
        #: a later one goes to the same place of the tier
        self.is_replaced = False
        # Whoever asks how the save ended may be the one who keeps it; all others wait until it is
        # kept. Reentrant: the handler of a signal may ask.
        self._lock = threading.RLock()
        self._ticket: Ticket | None = None
        self.failure: BaseException | None = None
        #: waiting for the drain
        self.drain_s: float = 0.0

    @property
    def folder(self) -> str:
        """Of the tier."""
        return self._drain.folder

    @property
    def context(self) -> Context:
        """Of the save."""
        return self._drain.context

    @property
    def is_kept(self) -> bool:
        """Whether it is safe on the tier."""
        return self._ticket is not None

    def keep(self) -> None:
        """Once the save has ended well: notes it in the tier's journal. Once."""
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
        """Loads would take it for the newest."""
        with _lock:
            if not self.is_replaced:
                Path(self._place).unlink(missing_ok=True)

    def has_ended(self, timeout: float | None) -> bool:
        """Waits, after keep(), until the save may be called done. False if it may not, in time."""
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
        """The save need not end at its destination any more."""
        self._to_the_end = False

    def is_drained(self) -> bool:
        """Whether it is at its destination, or a later one is."""
        if self._ticket is None:
            return self.is_overtaken
        return self._drain.is_drained(self._ticket)

    def wait_drained(self, timeout: float | None) -> bool:
        """Waits until it is; raises what the last drain failed with."""
        assert self._ticket is not None
        return self._drain.wait(self._ticket, timeout)

    def steps(self) -> tuple[Step, ...]:
        """What was not as preferred, as far as it is known now."""
        if self._ticket is None and self.is_overtaken:
            return (Step("a later save to it went directly, and stays", "overtaken"),)
        if self._ticket is None or self._ticket.result != "newer":
            return ()
        return (Step("not drained: there is a newer one at the destination", "tier"),)


_lock = ForkedLock()
# Of files, as long as anybody can ask for them, and their destinations.
_passages: WeakKeyDictionary[Passage, str] = WeakKeyDictionary()


def directly(path: str, why: str = "") -> Route:
    """Past the tier; `why`, if there is one."""
    steps = (Step(f"saved directly, not on the tier: {why}", "tier"),) if why else ()
    return Route(path, path, steps=steps)


def route_of(
    path: str,
    n_bytes: int,
    request: SaveRequest,
) -> Route:
    """That of a file to `path`, which will have so many bytes, or a little less."""
    route = _choose(path, n_bytes, request)
    if _passages or route.passage is not None:
        _tell_earlier(route)
    return route


def _tell_earlier(route: Route) -> None:
    """Saves to one path end in the order of the calls, whichever way they go."""
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
        # A full one is what it is there for: copies that wait. All else somebody has to mend.
        if error.errno != errno.ENOSPC:
            logger().warning('saves "%s" directly: %s', path, error)
        return directly(path, str(error))
    return Route(path, place, Passage(drain, place, to_the_end=request.to_destination))


def _why_directly(path: str, request: SaveRequest) -> str:
    if not request.replace:
        return "only at its destination can be told whether it replaces something"
    if request.due is not None:
        return "it has a deadline, and this node may end with it"
    if context_of_saves_to(path) is not None:
        return "an earlier save to it, directly, is under way"
    if UNDER_WAY in path:
        return "it is part of a directory that appears whole"
    return _why_not_drained(path, request.tier)


def _why_not_drained(path: str, folder: str) -> str:
    above = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    if os.path.commonpath((above, os.path.realpath(folder))) == os.path.realpath(folder):
        return "its destination is on the tier's disk"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            return "its destination is no regular file"
    except OSError:
        pass
    # What cannot be drained is to fail now.
    return "" if os.access(above, os.W_OK | os.X_OK) else "its directory cannot be written to"


def completed_over(route: Route, begin: Callable[[Route], SaveHandle]) -> Report:
    """A save that somebody waits for; directly after all, if the tier fails."""
    try:
        return completed(lambda: begin(route))
    except StorageError as error:
        if (
            route.passage is None
            or route.passage.is_kept  # the destination has failed
            or isinstance(error, CanceledError)
        ):
            raise
        why = str(error)
    return completed(lambda: begin(directly(route.path, why)))
