# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory that all ranks fill, and that appears as a whole.

Rank 0 makes a hidden directory and tells the others. Whoever has written its part tells rank 0, or
what went wrong, and rank 0 puts the directory in place. They use the store at which
torch.distributed met, never its collectives: a rank that fails says so and goes on.
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

# Of a rank for another one. torch's own patience at a barrier.
_PATIENCE_S = 1800.0
_HEARERS_S = 5.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.02
_FAILED = "!"

#: what is being filled, by the path that somebody means
_filling: dict[str, Whole] = {}


def filling(path: Any) -> Whole | None:
    """What is being filled for this path."""
    return _filling.get(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else None


def filling_in(folder: str) -> Whole | None:
    """What is being filled in this directory."""
    given = os.path.abspath(folder)  # noqa: PTH100
    for one in _filling.values():
        if os.path.dirname(os.path.abspath(one.path)) == given:  # noqa: PTH100, PTH120
            return one
    return None


def redirected(path: Any) -> Any:
    """Where a file goes, if it is one of a directory that is being filled."""
    if isinstance(path, (str, os.PathLike)):
        given = os.fspath(path)
        for place, whole in _filling.items():
            if given == place or given.startswith(place + os.sep):
                return whole.folder + given[len(place) :]
    return path


def is_inside(path: str | os.PathLike[str]) -> bool:
    """Whether it is where the files of a directory go that is being filled."""
    given = os.path.join(os.path.abspath(path), "")  # noqa: PTH100, PTH118
    return any(given.startswith(whole.folder + os.sep) for whole in _filling.values())


class _Ranks:
    """What they tell each other about one directory. Each is asked once, in the same order."""

    made = 0

    def __init__(self, distributed: Any) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        _Ranks.made += 1
        store = distributed.distributed_c10d._get_default_store()
        self._store = distributed.PrefixStore(f"ioshape/{_Ranks.made}", store)

    def tell(self, what: str, value: str) -> None:
        self._store.set(what, value)

    def ask(self, what: str) -> str:
        """Waits until somebody has told it."""
        end, pause = time.monotonic() + _PATIENCE_S, _LEAST_PAUSE_S
        # Not by wait(): nobody else could use the store meanwhile.
        while not self._store.check([what]):
            if time.monotonic() > end:
                raise TimeoutError(f"no word of {what!r} for {_PATIENCE_S:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)
        value: str = self._store.get(what).decode()
        return value

    def hear(self) -> None:
        """Tells that the last has been asked."""
        self._store.add("heard", 1)

    def wait_for_hearers(self) -> None:
        """The store may be of this process, which may end now."""
        end = time.monotonic() + _HEARERS_S
        while self._store.add("heard", 0) < self.size - 1 and time.monotonic() < end:
            time.sleep(_LEAST_PAUSE_S)


def _ranks_of_torch() -> _Ranks | None:
    """None if this process is alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return _Ranks(distributed) if distributed.get_world_size() > 1 else None


class Whole:
    """A directory that is being filled, by this process or by all ranks.

    `folder` is where its files go. finish() puts it in place; a with block that ends without drops
    it.
    """

    def __init__(self, path: str, *, beside: str | None = None) -> None:
        self.path = path
        self._durable = is_durable(None)
        self._ranks = _ranks_of_torch()
        self._directory: NewDirectory | None = None
        self._ended = False
        #: for when it is in place, on the rank that does it
        self.afterwards: list[Callable[[], object]] = []
        if self._ranks is None or self._ranks.rank == 0:
            self.folder = self._make(beside)
        else:
            told = self._listen("folder")
            # Nodes with disks of their own: there it goes as the framework has it.
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
        """What the other rank has told; raises what it has failed with."""
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
        """What goes to the path from now on is none of its files."""
        _filling.pop(self.path, None)

    def finish(self, told: str = "", complete: Callable[[list[str]], object] | None = None) -> None:
        """Puts it in place when all ranks have written their part. `complete` is called before, on
        the rank that does it, with what each has told."""
        self.stop_filling()
        inside = under_way.place_of(os.path.join(self.folder, ""))  # noqa: PTH118
        for handle in under_way.all_under_way():
            if handle._place.startswith(inside):
                handle.wait()
        if self._directory is not None:
            self._put_in_place(self._directory, told, complete)
            return
        assert self._ranks is not None
        if self._durable:
            sync_tree(self.folder)
        self._ended = True
        self._ranks.tell(str(self._ranks.rank), told)
        self._listen("end")
        self._ranks.hear()

    def _put_in_place(
        self,
        directory: NewDirectory,
        told: str,
        complete: Callable[[list[str]], object] | None,
    ) -> None:
        with directory:
            others = range(1, self._ranks.size if self._ranks is not None else 1)
            of_each = [told, *(self._listen(str(rank), rank) for rank in others)]
            if complete is not None:
                complete(of_each)
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
        """Drops it, if it is not in place, and tells the others."""
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
    """What the block writes to this path appears there as a whole; in the background, if that is
    where its saves are."""
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
    """Waits for the saves of a directory, and puts it in place. The process does not end before."""

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
    """Waits for all that are on their way; raises what the first of them failed with."""
    while _under_way:
        one = _under_way[0]
        one.join()
        _under_way.remove(one)
        if one.error is not None:
            raise one.error


@under_way.after_saves
def _tell_failures() -> None:
    """At the end of a process in which nobody has asked."""
    try:
        wait_for_checkpoints()
    except Exception as error:
        _terminal.say(f"a checkpoint in the background failed: {error}")
        under_way.end_nonzero()


os.register_at_fork(after_in_child=_under_way.clear)
