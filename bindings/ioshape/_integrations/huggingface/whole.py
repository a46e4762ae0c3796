# SPDX-License-Identifier: Apache-2.0
"""Fill a hidden checkpoint directory on all ranks, which then appears as a whole.

Rank 0 creates the directory and sends its path to the others. Each rank reports that it has written
its part, or what went wrong, and rank 0 puts the directory in place. The ranks use the rendezvous
store of torch.distributed, never its collectives: a rank that fails can say so and go on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ioshape._core import terminal as _terminal
from ioshape._core import under_way
from ioshape._core.config import is_durable
from ioshape._core.errors import failure
from ioshape._files.directory import NewDirectory, sync_tree
from ioshape._save import collected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from ioshape._save.handle import SaveHandle

# Seconds that a rank waits for another one: torch's default timeout of a barrier.
_MOST_WAIT_S = 1800.0
_HEARERS_S = 5.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.02
_FAILED = "!"

#: the directories that are being filled, by the path at which each will appear
_filling: dict[str, Whole] = {}


def filling(path: Any) -> Whole | None:
    """Return the directory that is being filled for this path; None if there is none."""
    return _filling.get(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None


def filling_in(folder: str) -> Whole | None:
    """Return the directory that is being filled and will appear in this folder; None if none is."""
    given = os.path.abspath(folder)  # noqa: PTH100
    for one in _filling.values():
        if os.path.dirname(os.path.abspath(one.path)) == given:  # noqa: PTH100, PTH120
            return one
    return None


def redirected(path: Any) -> Any:
    """Return the path in the hidden directory, for a path below a directory that is being filled.

    Other values are returned as they are.
    """
    if isinstance(path, (str, os.PathLike)):
        given = os.fspath(path)
        for destination, whole in _filling.items():
            if given == destination or given.startswith(destination + os.sep):
                return whole.folder + given[len(destination) :]
    return path


def is_inside(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is in a hidden directory that is being filled."""
    given = os.path.join(os.path.abspath(path), "")  # noqa: PTH100, PTH118
    return any(given.startswith(whole.folder + os.sep) for whole in _filling.values())


class _Ranks:
    """The messages between ranks about one directory. Each is read once, in one order."""

    made = 0

    def __init__(self, distributed: Any) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        _Ranks.made += 1
        store = distributed.distributed_c10d._get_default_store()
        self._store = distributed.PrefixStore(f"ioshape/{_Ranks.made}", store)

    def tell(self, what: str, value: str) -> None:
        self._store.set(what, value)

    def ask(self, what: str) -> str:
        """Wait for a message, and return it."""
        end, pause = time.monotonic() + _MOST_WAIT_S, _LEAST_PAUSE_S
        # The store's wait() would block all other threads that use the store.
        while not self._store.check([what]):
            if time.monotonic() > end:
                raise TimeoutError(f"no message {what!r} within {_MOST_WAIT_S:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)
        value: str = self._store.get(what).decode()
        return value

    def hear(self) -> None:
        """Report that this rank has read the last message."""
        self._store.add("heard", 1)

    def wait_for_hearers(self) -> None:
        """Wait until all ranks have read the last message.

        The store may belong to this process, which may end next.
        """
        end = time.monotonic() + _HEARERS_S
        while self._store.add("heard", 0) < self.size - 1 and time.monotonic() < end:
            time.sleep(_LEAST_PAUSE_S)


def _ranks_of_torch() -> _Ranks | None:
    """Return the messages between ranks; None if this process is alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _Ranks(distributed) if distributed.get_world_size() > 1 else None


class Whole:
    """A directory that this process or all ranks fill.

    Its files must be written to `folder`. finish() puts it in place. If the `with` block ends by an
    exception, the directory is removed.
    """

    def __init__(self, path: str, *, beside: str | None = None) -> None:
        self.path = path
        self._durable = is_durable(None)
        self._ranks = _ranks_of_torch()
        self._directory: NewDirectory | None = None
        self._ended = False
        #: called when the directory is in place, on the rank that has put it there
        self.afterwards: list[Callable[[], object]] = []
        if self._ranks is None or self._ranks.rank == 0:
            self.folder = self._make(beside)
        else:
            told = self._listen("folder")
            # On a node with a disk of its own, files are written as without ioshape.
            self.folder = told if os.path.isdir(told) else path  # noqa: PTH112
        if self.folder != path:
            _filling[path] = self

    def _make(self, beside: str | None) -> str:
        try:
            self._directory = NewDirectory(
                self.path, durable=self._durable, beside=beside, ranks_agree=True
            )
        except Exception as error:
            self._tell("folder", _FAILED + str(error))
            raise
        self._tell("folder", self._directory.path)
        return self._directory.path

    def _tell(self, what: str, value: str) -> None:
        if self._ranks is not None:
            self._ranks.tell(what, value)

    def _listen(self, what: str, rank: int = 0) -> str:
        """Return the message of another rank, or raise the failure that it reports."""
        assert self._ranks is not None
        told = self._ranks.ask(what)
        if told.startswith(_FAILED):
            raise failure(
                -errno.EIO,
                f'cannot save "{self.path}": rank {rank} failed: {told[len(_FAILED) :]}',
                self.path,
                "save",
            )
        return told

    def stop_filling(self) -> None:
        """Stop redirecting: files written to the path from now on are not part of the directory."""
        _filling.pop(self.path, None)

    def finish(self) -> None:
        """Put the directory in place when all ranks have written their part."""
        self.stop_filling()
        inside = under_way.canonical(os.path.join(self.folder, ""))  # noqa: PTH118
        for handle in under_way.all_under_way():
            if handle._canonical_path.startswith(inside):
                handle.wait()
        if self._directory is not None:
            self._commit(self._directory)
            return
        assert self._ranks is not None
        if self._durable:
            sync_tree(self.folder)
        self._ended = True
        self._ranks.tell(str(self._ranks.rank), "")
        self._listen("end")
        self._ranks.hear()

    def _commit(self, directory: NewDirectory) -> None:
        with directory:
            for rank in range(1, self._ranks.size if self._ranks is not None else 1):
                self._listen(str(rank), rank)
            if self._durable:
                sync_tree(directory.path)
            directory.commit()
        self._ended = True
        if self._ranks is not None:
            self._ranks.tell("end", "")
            self._ranks.wait_for_hearers()
        for call in self.afterwards:
            call()

    def fail(self, error: BaseException) -> None:
        """Remove the directory, unless it is in place, and report the failure to other ranks."""
        self.stop_filling()
        if self._ended:
            return
        self._ended = True
        if self._directory is not None:
            self._directory.close()
            self._tell("end", _FAILED + str(error))
        elif self._ranks is not None:
            self._ranks.tell(str(self._ranks.rank), _FAILED + str(error))

    def __enter__(self) -> Whole:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)


@contextlib.contextmanager
def checkpoint(path: str) -> Iterator[None]:
    """Make what the block writes to this path appear as a whole.

    If the saves of the block run in the background, so does the rest.
    """
    with Whole(path) as whole:
        handles = collected.begun()
        try:
            yield
        except BaseException:
            for handle in handles or ():
                handle.cancel()
            raise
        if handles is None:
            whole.finish()
        else:
            whole.stop_filling()
            _Finishing(whole, handles)


# ---- In the background ------------------------------------------------------------------------

_under_way: list[_Finishing] = []


class _Finishing(threading.Thread):
    """A thread that waits for the saves of a directory and puts it in place.

    It is not a daemon: the process waits for it.
    """

    def __init__(self, whole: Whole, handles: list[SaveHandle]) -> None:
        super().__init__(name="ioshape")
        self._whole, self._handles = whole, handles
        self.error: BaseException | None = None
        _under_way.append(self)
        self.start()

    def run(self) -> None:
        try:
            with self._whole as whole:
                for handle in self._handles:
                    handle.wait()
                whole.finish()
        except BaseException as error:
            self.error = error


def wait_for_checkpoints() -> None:
    """Wait for all checkpoints in progress; raise the first failure."""
    while _under_way:
        one = _under_way[0]
        one.join()
        _under_way.remove(one)
        if one.error is not None:
            raise one.error


@under_way.after_saves
def _tell_failures() -> None:
    """Report failures at the end of a process that has not called wait_for_checkpoints()."""
    try:
        wait_for_checkpoints()
    except Exception as error:
        _terminal.say(f"a background checkpoint failed: {error}")
        under_way.end_nonzero()


os.register_at_fork(after_in_child=_under_way.clear)
