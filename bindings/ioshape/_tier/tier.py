# SPDX-License-Identifier: Apache-2.0
"""The library's tier: a fast disk on which checkpoints lie until they are drained."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ioshape._core import config
from ioshape._core.callbacks import Teller
from ioshape._core.context import encoded
from ioshape._core.descriptors import open_file
from ioshape._core.errors import last_failure
from ioshape._core.structs import Owner, called_from_c, keep_failure, sized
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._core.context import Context
    from ioshape._core.errors import StorageError
    from ioshape._core.report import Progress

Result = Literal["drained", "overtaken", "newer", "gone", "failed", "waits"]

_RESULTS: dict[int, Result] = {
    lib.IOSHAPE_DRAINED: "drained",
    lib.IOSHAPE_DRAINED_OVERTAKEN: "overtaken",
    lib.IOSHAPE_DRAINED_NEWER: "newer",
    lib.IOSHAPE_DRAINED_GONE: "gone",
    lib.IOSHAPE_DRAINED_FAILED: "failed",
    lib.IOSHAPE_DRAINED_WAITS: "waits",
}


_PARITIES = config.SETTINGS["parity"].words


@dataclass(frozen=True)
class Copy:
    """A checkpoint that lies on the tier."""

    #: of the destination
    path: str
    #: on the tier
    place: str
    n_bytes: int
    #: when it was saved; in UTC
    saved: datetime
    #: in the journal: the lowest is drained first; 0: it has been drained
    number: int
    is_directory: bool

    @property
    def is_waiting(self) -> bool:
        """Whether it has yet to be drained."""
        return self.number > 0


class Drained(NamedTuple):
    """What became of a copy."""

    #: of the destination
    path: str
    #: "drained"; "overtaken": a later save to the same path goes instead; "newer": there is a newer
    #: one at the destination, which stays; "gone": it was removed from the tier before; "failed":
    #: it waits for the next drain; "waits": a generation of several nodes, whose files from here
    #: are there, waits for those of the others
    result: Result
    #: that were carried
    n_bytes: int
    #: why it failed
    error: StorageError | None


def own_folder(folder: str) -> str:
    """This user's, on a tier."""
    return f"{os.path.realpath(folder).rstrip('/')}/ioshape-{os.geteuid()}"


def journal_of(folder: str) -> str:
    """A folder of a tier. What is in it changes with all that becomes of copies."""
    return f"{own_folder(folder)}/journal"


def is_tier(folder: str) -> bool:
    """Whether this user has ever saved there."""
    return os.path.isdir(journal_of(folder))  # noqa: PTH112


def other_owner(folder: str) -> int | None:
    """Return the user who has made the folder that is this user's on a tier, if another user has.

    Where everybody may make folders any user can do that, and only that user or root removes it.
    """
    try:
        owner = os.lstat(own_folder(folder)).st_uid
    except OSError:
        return None
    return owner if owner != os.geteuid() else None


def of_another_user(folder: str, owner: int) -> str:
    """Return the sentence about a tier on which another user has made this user's folder."""
    return (
        f"{own_folder(folder)} belongs to user {owner}, so saves of user {os.geteuid()} do not go "
        "to this tier, and nothing of theirs waits there; ask the administrator to remove it"
    )


def is_draining(folder: str) -> bool:
    """Whether a process drains that tier now."""
    return is_locked(f"{own_folder(folder)}/drain.lock")


def is_locked(path: str) -> bool:
    """Whether a process holds that lock of a tier."""
    try:
        # On the tier of another user it may be anything: a pipe is not waited for.
        fd = open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, and for an instant: a drain that begins right now tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Stop:
    """By which another thread ends a drain, without taking the GIL for every block."""

    def __init__(self) -> None:
        self.flag: Any = ffi.new("int *")

    def set(self) -> None:
        """From now on drains end with a CanceledError."""
        self.flag[0] = 1


class Tier(Owner):
    """A folder on a fast disk, and what this user has on it. Any thread may use it."""

    def __init__(self, context: Context, folder: str, *, keep_last: int = 0) -> None:
        """Makes the user's own folder in it, if it is not there.

        Args:
            context: whose share and rate drains have.
            folder: on the fast disk; it must be there.
            keep_last: drained copies that stay in each directory, newest first; 0: as many as there
                is room for.
        """
        super().__init__("tier", folder, context)
        self.folder = folder
        #: what a destination's path stands behind there
        self.files: str = f"{own_folder(folder)}/files"
        options = sized("ioshape_tier_options")
        options.keep_last = keep_last
        options.parity = _PARITIES.index(config.value_of("parity") or _PARITIES[0])
        self._check(
            lib.ioshape_tier_open(context.pointer, encoded(folder), options, self._out),
            folder,
            "save",
        )

    def close(self) -> None:
        """No call on it may be under way. A second call does nothing."""
        self._let_go()

    @staticmethod
    def _check(code: int, path: str, operation: str) -> None:
        if code:
            raise last_failure(path, operation)

    # ---- Saves and loads -------------------------------------------------------------------------

    def place(self, path: str, num_bytes: int) -> str:
        """Where to save what shall end at `path`. There is room for so many bytes then; 0: unknown.

        Raises:
            StorageError: with errno ENOSPC, if what is left there waits to be drained.
        """
        out = ffi.new("char **")
        code = lib.ioshape_tier_place(self._pointer, encoded(path), num_bytes, out)
        self._check(code, path, "save")
        return _taken(out)

    def keep(self, path: str, *, keep_last: int = 0, keep_every: int = 0) -> None:
        """Notes, durably, that what was saved there is to be carried to `path`.

        Args:
            path: as for place().
            keep_last: of a group's generation: once it is drained, so many stay at the destination,
                as in prune(); 0: all.
            keep_every: the same.
        """
        options = sized("ioshape_tier_keep_options")
        options.keep_last = keep_last
        options.keep_every = keep_every
        self._check(lib.ioshape_tier_keep(self._pointer, encoded(path), options), path, "save")

    def find(self, path: str) -> str | None:
        """The copy of `path`; None if there is none, or the destination's is newer."""
        out = ffi.new("char **")
        code = lib.ioshape_tier_find(self._pointer, encoded(path), out)
        if code == -errno.ENOENT:
            return None
        self._check(code, path, "load")
        return _taken(out)

    # ---- What lies there -------------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """First what waits to be drained, in that order, then what has been."""
        rows, count = ffi.new("struct ioshape_tier_copy **"), ffi.new("size_t *")
        code = lib.ioshape_tier_list(self._pointer, rows, count)
        self._check(code, self.folder, "list")
        try:
            return [_copy(rows[0][index]) for index in range(count[0])]
        finally:
            lib.ioshape_free(rows[0])

    def drain(
        self,
        path: str | None = None,
        *,
        ended: Callable[[Drained], object] | None = None,
        progress: Callable[[Progress], object] | None = None,
        stop: Stop | None = None,
    ) -> None:
        """Carries what waits to its destinations, oldest first, until nothing waits any more.

        Args:
            path: only what was kept for this one. Default: everything.
            ended: is told of each copy when it is done with. An exception in it is raised when the
                drain ends, which it does soon with `progress`, or on the main thread.
            progress: is called with a Progress of the copy that is carried, and while another
                process drains (phase "wait"). An exception in it ends the drain. Without it, what
                another thread drains does not take the GIL for every block.
            stop: ends the drain from another thread, in the place of `progress`.

        Raises:
            StorageError: the first failure. What failed stays; the others have been drained. Its
                errno is EAGAIN if nothing has failed, and something waits for other nodes.
        """
        options = sized("ioshape_drain_options")
        wanted = None if path is None else ffi.new("char[]", encoded(path))
        if wanted is not None:
            options.path = wanted
        listener = _Listener(ended, progress)
        user = ffi.new_handle(listener)
        if stop is not None:
            options.progress = lib.ioshape_py_progress_until
            options.progress_user = stop.flag
        elif progress is not None or threading.current_thread() is threading.main_thread():
            options.progress = lib.ioshape_py_progress
            options.progress_user = user
        if ended is not None:
            options.ended = lib.ioshape_py_drained
            options.ended_user = user
        code = lib.ioshape_tier_drain(self._pointer, options)
        if listener.failure is not None:
            raise listener.failure
        self._check(code, path or self.folder, "drain")

    def forget(self, path: str) -> int:
        """Removes what waits for `path`, undrained; how many bytes the copy had.

        Raises:
            StorageError: with errno ENOENT, if nothing waits for it; EBUSY, if a process drains.
        """
        n_bytes = ffi.new("uint64_t *")
        code = lib.ioshape_tier_forget(self._pointer, encoded(path), n_bytes)
        self._check(code, path, "forget")
        return int(n_bytes[0])


def _taken(out: Any) -> str:
    """A path of ours from now on."""
    try:
        return os.fsdecode(ffi.string(out[0]))
    finally:
        lib.ioshape_free(out[0])


def _copy(row: Any) -> Copy:
    return Copy(
        path=os.fsdecode(ffi.string(row.path)),
        place=os.fsdecode(ffi.string(row.place)),
        n_bytes=row.bytes,
        saved=datetime.fromtimestamp(row.saved_s, tz=timezone.utc),
        number=row.number,
        is_directory=bool(row.directory),
    )


class _Listener(Teller):
    """Takes both callbacks of a drain to C."""

    def __init__(
        self,
        ended: Callable[[Drained], object] | None,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        super().__init__(progress or _ignore)
        self._ended = ended

    def tell(self, phase: int, done_bytes: int, total_bytes: int) -> None:
        """Whatever the other one raised stops the drain here: it cannot itself."""
        if self.failure is not None:
            raise self.failure
        super().tell(phase, done_bytes, total_bytes)

    def tell_ended(self, path: str, result: Result, n_bytes: int) -> None:
        """What the library calls when it is done with a copy."""
        if self._ended is not None and self.failure is None:
            error = last_failure(path, "drain") if result == "failed" else None
            self._ended(Drained(path, result, n_bytes, error))


def _ignore(_progress: Progress) -> None:
    pass


@called_from_c(onerror=keep_failure)
def ioshape_py_drained(listener: _Listener, path: Any, result: int, n_bytes: int) -> None:
    listener.tell_ended(os.fsdecode(ffi.string(path)), _RESULTS[result], n_bytes)
