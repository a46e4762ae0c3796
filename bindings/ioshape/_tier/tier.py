# SPDX-License-Identifier: Apache-2.0
"""Wrap the library's tier: a fast disk that holds checkpoints until they are drained.

The C library keeps the journal and copies the files; `_tier/drain.py` decides when.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ioshape._core import config
from ioshape._core.callbacks import Teller
from ioshape._core.context import encoded
from ioshape._core.descriptors import open_file
from ioshape._core.errors import last_failure
from ioshape._core.log import logger
from ioshape._core.structs import (
    Owner,
    called_from_c,
    enum_names,
    keep_failure,
    path_said,
    shared_fields,
    sized,
)
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._core.context import Context
    from ioshape._core.errors import StorageError
    from ioshape._core.report import Progress


Result = Literal["drained", "overtaken", "newer", "gone", "failed", "waits"]

_RESULTS: dict[int, Any] = {lib.IOSHAPE_DRAINED: "drained", **enum_names("IOSHAPE_DRAINED_")}


_PARITIES = config.SETTINGS["parity"].words


@dataclass(frozen=True)
class Copy:
    """A checkpoint on the tier."""

    #: path of the destination
    path: str
    #: path on the tier
    copy_path: str
    n_bytes: int
    #: time of the save, in UTC
    saved: datetime
    #: position in the journal: the lowest number is drained first. 0 if the copy has been drained
    number: int
    is_directory: bool

    @property
    def is_waiting(self) -> bool:
        """True if the copy has yet to be drained."""
        return self.number > 0


class Drained(NamedTuple):
    """The result of draining one copy."""

    #: path of the destination
    path: str
    #: "drained": it is at its destination. "overtaken": a later save to the same path is drained
    #: instead. "newer": the destination has a newer checkpoint, which stays. "gone": the copy was
    #: removed from the tier before. "failed": the next drain tries again. "waits": the files of
    #: this node are at the destination, but those of other nodes are missing
    result: Result
    #: bytes that were copied
    n_bytes: int
    #: the reason if the result is "failed", else None
    error: StorageError | None


def own_folder(folder: str) -> str:
    """Return the folder of this user on a tier."""
    return f"{os.path.realpath(folder).rstrip('/')}/ioshape-{os.geteuid()}"


def journal_of(folder: str) -> str:
    """Return the folder of a tier's journal. Its contents change with the state of each copy."""
    return f"{own_folder(folder)}/journal"


def is_tier(folder: str) -> bool:
    """Return whether this user has ever saved to this tier."""
    return os.path.isdir(journal_of(folder))  # noqa: PTH112


def other_owner(folder: str) -> int | None:
    """Return the other user who owns this user's folder on a tier; None if there is none.

    In a folder in which all users may create directories, any user can create that one. Only its
    owner and root can remove it.
    """
    try:
        owner = os.lstat(own_folder(folder)).st_uid
    except OSError:
        return None
    return owner if owner != os.geteuid() else None


def of_another_user(folder: str, owner: int) -> str:
    """Return the message about a tier on which another user owns this user's folder."""
    return (
        f"{own_folder(folder)} belongs to user {owner}, so user {os.geteuid()} cannot use this "
        "tier and has no saves there; ask the administrator to remove it"
    )


def is_draining(folder: str) -> bool:
    """Return whether a process is draining that tier now."""
    return is_locked(f"{own_folder(folder)}/drain.lock")


def is_locked(path: str) -> bool:
    """Return whether a process holds this lock of a tier."""
    try:
        # On another user's tier the path may be of any type. O_NONBLOCK: a named pipe must not
        # block.
        fd = open_file(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # The lock is shared and held for an instant only; a drain that begins meanwhile tries
        # again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Stop:
    """A flag by which another thread ends a drain.

    C reads the flag, so the drain need not take the GIL for every block.
    """

    def __init__(self) -> None:
        self.flag: Any = ffi.new("int *")

    def set(self) -> None:
        """Make running and future drains end with a CanceledError."""
        self.flag[0] = 1


class Tier(Owner):
    """A folder on a fast disk, with this user's checkpoints on it.

    Any thread may use it, but none while it is closed.
    """

    def __init__(self, context: Context, folder: str, *, keep_last: int = 0) -> None:
        """Open the tier; create the user's own folder in it if it does not exist.

        Args:
            context: The context whose pool share and rate limit the drains use.
            folder: A folder on the fast disk; it must exist.
            keep_last: How many drained copies stay in each directory, newest first; 0: as many as
                fit.
        """
        super().__init__("tier", folder, context)
        self.folder = folder
        #: prefix on the tier: a destination's absolute path is appended to it
        self.files: str = f"{own_folder(folder)}/files"
        options = sized("ioshape_tier_options")
        options.keep_last = keep_last
        options.parity = _PARITIES.index(config.value_of("parity") or _PARITIES[0])
        self._check(
            lib.ioshape_tier_open(context.pointer, encoded(folder), options, self._out),
            folder,
            "save",
        )

    @staticmethod
    def _check(code: int, path: str, operation: str) -> None:
        if code:
            raise last_failure(path, operation)

    # ---- Saves and loads -------------------------------------------------------------------------

    def path_for(self, path: str, num_bytes: int) -> str:
        """Return where to save a checkpoint whose destination is `path`.

        The library first makes space for `num_bytes` bytes; 0 means that the size is unknown.

        Raises:
            StorageError: With errno ENOSPC if only copies that wait to be drained are left to
                remove.
        """
        out = ffi.new("char **")
        code = lib.ioshape_tier_path(self._pointer, encoded(path), num_bytes, out)
        self._check(code, path, "save")
        return _taken(out)

    def keep(self, path: str, *, keep_last: int = 0, keep_every: int = 0) -> None:
        """Record durably that the copy of `path` must be drained.

        Args:
            path: The destination, as given to path_for().
            keep_last: For a group checkpoint: how many stay at the destination once this one is
                drained, as in prune(); 0: all.
            keep_every: For a group checkpoint: those whose step is a multiple of this number stay,
                too.
        """
        options = sized("ioshape_tier_keep_options")
        options.keep_last = keep_last
        options.keep_every = keep_every
        self._check(lib.ioshape_tier_keep(self._pointer, encoded(path), options), path, "save")

    def find(self, path: str) -> str | None:
        """Return the path of the copy of `path`; None if there is none or it is outdated."""
        out = ffi.new("char **")
        code = lib.ioshape_tier_find(self._pointer, encoded(path), out)
        if code == -errno.ENOENT:
            return None
        self._check(code, path, "load")
        return _taken(out)

    # ---- Copies on the tier ----------------------------------------------------------------------

    def copies(self) -> list[Copy]:
        """Return the copies that wait, in the order of draining, and then the drained ones."""
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
        """Copy waiting checkpoints to their destinations, oldest first, until none waits.

        Args:
            path: The only destination to drain. Default: all.
            ended: Is called with the result of each copy. An exception in it is raised when the
                drain ends. That is soon with `progress` and on the main thread.
            progress: Is called with a Progress of the copy that is being drained, and while another
                process drains (phase "wait"). An exception in it ends the drain. Without it, a
                drain on another thread need not take the GIL for every block.
            stop: Lets another thread end the drain; used instead of `progress`.

        Raises:
            StorageError: The first failure. Copies that failed stay, and the others have been
                drained. Its errno is EAGAIN if nothing has failed, but a checkpoint waits for other
                nodes.
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
        """Remove the copy that waits for `path` without draining it; return its bytes.

        Raises:
            StorageError: With errno ENOENT if none waits for this path; EBUSY if a process drains.
        """
        n_bytes = ffi.new("uint64_t *")
        code = lib.ioshape_tier_forget(self._pointer, encoded(path), n_bytes)
        self._check(code, path, "forget")
        return int(n_bytes[0])


def _taken(out: Any) -> str:
    """Return the path that C has allocated, and free the C string."""
    try:
        return path_said(out[0])
    finally:
        lib.ioshape_free(out[0])


def _copy(row: Any) -> Copy:
    saved = datetime.fromtimestamp(row.saved_s, tz=timezone.utc)
    told = shared_fields(Copy, row, text=path_said)
    return Copy(saved=saved, is_directory=bool(row.directory), **told)


class _Listener(Teller):
    """The receiver of both callbacks of a drain, which C calls."""

    def __init__(
        self,
        ended: Callable[[Drained], object] | None,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        super().__init__(progress or _ignore)
        self._ended = ended

    def tell(self, phase: int, done_bytes: int, total_bytes: int) -> None:
        """Report progress, or raise what `ended` has raised, because only this stops the drain."""
        if self.failure is not None:
            raise self.failure
        super().tell(phase, done_bytes, total_bytes)

    def tell_ended(self, path: str, result: Result, n_bytes: int) -> None:
        """Report the result of a copy to the caller's `ended`."""
        if self._ended is not None and self.failure is None:
            error = last_failure(path, "drain") if result == "failed" else None
            self._ended(Drained(path, result, n_bytes, error))


def _ignore(_progress: Progress) -> None:
    pass


@called_from_c(onerror=keep_failure)
def ioshape_py_drained(listener: _Listener, path: Any, result: int, n_bytes: int) -> None:
    listener.tell_ended(os.fsdecode(ffi.string(path)), _RESULTS[result], n_bytes)


# ---- Survey of all users -------------------------------------------------------------------------
#
# Survey what all users have on a tier, for an operator, from names and times alone.


_OWN = re.compile(r"ioshape-(\d+)")


@dataclass(frozen=True)
class Use:
    """The use that one user makes of a tier."""

    folder: str
    #: numeric user id
    user: int
    #: number of destinations that wait to be drained
    waiting: int
    waiting_bytes: int
    #: age of the longest waiting copy, in seconds; 0 if none waits
    oldest_s: float
    is_draining: bool
    #: time at which the last of the drained copies that still exist was drained, in seconds since
    #: 1970; 0: none
    drained_s: float


def tiers_at(folder: str) -> list[Use]:
    """Return what each user has on a tier. Raise OSError if the folder cannot be read.

    A user's folder that cannot be read does not hide the others. A folder that belongs to another
    user than its name says is ignored.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _OWN.fullmatch(entry.name)
            try:
                if name and _is_tier_of(int(name[1]), entry):
                    found.append(_use(folder, int(name[1]), Path(entry.path, "journal")))
            except OSError as error:
                logger().info("cannot look at the tier %s: %s", entry.path, error.strerror)
    return sorted(found, key=lambda one: one.user)


def _is_tier_of(user: int, entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is this user's folder of a tier.

    Symbolic links are not followed: a user could point them at any path that the operator can
    read.
    """
    if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != user:
        return False
    try:
        folders = [Path(entry.path, name).lstat() for name in ("files", "journal")]
    except FileNotFoundError:
        return False
    return all(stat.S_ISDIR(folder.st_mode) for folder in folders)


def _use(folder: str, user: int, journal: Path) -> Use:
    since: dict[str, float] = {}
    drained_s = 0.0
    for name in os.listdir(journal):  # noqa: PTH208
        link = journal / name
        try:
            status = link.lstat()
            path, is_drained = _entry(name, os.readlink(link))  # noqa: PTH115
        except OSError:  # the entry changed meanwhile, or is not an entry of the journal
            continue
        if is_drained:
            drained_s = max(drained_s, status.st_ctime)
        elif path:
            since[path] = min(status.st_mtime, since.get(path, status.st_mtime))
    root = os.path.realpath(journal.parent)
    return Use(
        folder,
        user,
        len(since),
        sum(sum(_sizes(f"{root}/files{path}")) for path in since),
        max(0.0, time.time() - min(since.values())) if since else 0.0,
        is_locked(f"{root}/drain.lock"),
        drained_s,
    )


def _entry(name: str, text: str) -> tuple[str, bool]:
    """Return the destination of a journal entry, and whether it is drained; "" if it is none."""
    kept, drained = ffi.new("char[]", os.fsencode(text)), ffi.new("int *")
    path = lib.tier_path_of_entry(os.fsencode(name), kept, drained)
    return (os.fsdecode(ffi.string(path)), bool(drained[0])) if path else ("", False)


def _sizes(copy_path: str) -> Iterator[int]:
    """Yield the size of a file, or of each file in a directory. Symbolic links are not followed."""
    try:
        size = os.lstat(copy_path).st_size
    except OSError:
        return
    above = os.path.dirname(copy_path)  # noqa: PTH120
    if os.path.realpath(above) != above:
        return
    yield size
    for folder, _folders, names in os.walk(copy_path):
        for name in names:
            try:
                yield os.lstat(f"{folder}/{name}").st_size
            except OSError:  # drained and removed meanwhile
                continue
