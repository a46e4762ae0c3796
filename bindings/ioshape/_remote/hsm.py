# SPDX-License-Identifier: Apache-2.0
"""Archive checkpoints with Lustre HSM: ask for copies, and wait until they exist.

On Amazon FSx for Lustre the archive is the S3 bucket of a data repository. This module uses only
ioctls of the Lustre client, whose numbers and structs are stable.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ioshape._core.descriptors import open_file
from ioshape._core.errors import failure
from ioshape._core.names import is_unfinished
from ioshape._core.report import Progress
from ioshape._remote.listing import MARKERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._core.errors import StorageError

# LL_IOC_HSM_STATE_GET, LL_IOC_HSM_REQUEST, LL_IOC_HSM_ACTION, LL_IOC_PATH2FID
_STATE, _REQUEST, _ACTION, _FID = 0x802066D3, 0x401866D9, 0x801866DC, 0x800866AD
# struct hsm_user_state: the flags come first, and the rest is ignored.
_STATE_BYTES = 32
_DIRTY, _ARCHIVED, _NOARCHIVE, _LOST = 0x2, 0x8, 0x20, 0x40  # HS_...
# struct hsm_current_action: the state, the action, its offset, and its bytes so far.
_CURRENT = struct.Struct("=IIQQ")
_RUNNING = 2  # HPS_RUNNING
# struct hsm_user_request with one item: the action, the archive (0: the default), flags, number of
# items, bytes after them. Then the file's FID, and the range of its bytes (all).
_ONE_FILE = struct.Struct("=IIQII16sQQ")
_ARCHIVE = 10  # HUA_ARCHIVE
_TO_THE_END = 2**64 - 1

#: seconds without any progress after which archive() gives up
TIMEOUT_S = 600.0
# Seconds between two looks. Each look asks the metadata server once for each unfinished file.
_FIRST_LOOK_S, _LOOK_S = 0.05, 2.0
# Lustre looks up a file's action in the list of all actions, so only so many files are asked about
# at a time.
_MOST_ACTIONS = 16


@dataclass(frozen=True)
class Archived:
    """The result of an archive call."""

    path: str
    files: int
    #: total size of all files
    n_bytes: int
    #: bytes that this call has archived; the others were in the archive before
    archived_bytes: int
    total_s: float


class _File(NamedTuple):
    path: str
    n_bytes: int


def _refused(path: str, why: str, remedy: str, number: int) -> StorageError:
    return failure(-number, f'cannot archive "{path}": {why}', path, "archive", remedy=remedy)


_NO_LUSTRE = (
    "it is not on a Lustre filesystem, or its client does not support HSM",
    "give a path on one whose files are archived, such as FSx with a data repository",
)
_REASONS = {
    errno.ENOENT: ("it was removed", ""),
    errno.EAGAIN: (
        "HSM is not enabled for this filesystem",
        "link a data repository to it (FSx), or ask the administrator to start the coordinator on "
        "its metadata servers: lctl set_param mdt.*.hsm_control=enabled",
    ),
    errno.EPERM: (
        "the metadata server accepts such requests only from root",
        "run this as root, or ask the administrator for the right on the metadata servers: "
        "lctl set_param mdt.*.hsm.user_request_mask=ARCHIVE,RESTORE; if files are archived "
        "automatically, --check reports whether they are",
    ),
    **dict.fromkeys((errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP), _NO_LUSTRE),
}

# Flags of a file that prevent archiving it.
_MARKS = {
    _NOARCHIVE: ("it is marked not to be archived", "allow it: lfs hsm_clear --noarchive"),
    _LOST: ("its copy in the archive is lost", "clear the mark: lfs hsm_clear --lost --archived"),
}


def _ioctl(path: str, number: int, argument: bytearray, *, of_directory: bool = False) -> bytearray:
    """Call an ioctl for a file, which is opened but not read.

    Reading would restore a released file from the archive.
    """
    opened = os.path.dirname(path) or "." if of_directory else path  # noqa: PTH120
    try:
        fd = open_file(opened, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, number, argument)
        finally:
            os.close(fd)
    except OSError as error:
        why, remedy = _REASONS.get(error.errno or 0) or (error.strerror or str(error), "")
        raise _refused(path, why, remedy, error.errno or errno.EIO) from None
    return argument


def _flags_of(path: str) -> int:
    found = _ioctl(path, _STATE, bytearray(_STATE_BYTES))
    return int.from_bytes(found[:4], sys.byteorder)


def _is_archived(flags: int) -> bool:
    """Return whether the archive has the whole file in its current state."""
    return flags & (_ARCHIVED | _DIRTY | _LOST) == _ARCHIVED


def _ask_for(path: str) -> None:
    fid = bytes(_ioctl(path, _FID, bytearray(16)))
    request = _ONE_FILE.pack(_ARCHIVE, 0, 0, 1, 0, fid, 0, _TO_THE_END)
    _ioctl(path, _REQUEST, bytearray(request), of_directory=True)


def _action_of(path: str) -> tuple[bool, int]:
    """Return whether the file still waits to be archived, and how many bytes have been copied."""
    found = _ioctl(path, _ACTION, bytearray(_CURRENT.size))
    state, action, _offset, n_bytes = _CURRENT.unpack(found)
    return action == _ARCHIVE, n_bytes if state == _RUNNING else 0


# ---- A checkpoint's files ------------------------------------------------------------------------


def _walk(path: str) -> Iterator[str]:
    if not os.path.isdir(path):  # noqa: PTH112
        yield path
        return

    def stop(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(path, onerror=stop):
        subfolders[:] = [name for name in subfolders if not is_unfinished(name)]
        yield from (f"{folder}/{name}" for name in names if not is_unfinished(name))


def _files(path: str) -> list[_File]:
    found = []
    try:
        for one in _walk(path):
            status = os.stat(one)  # noqa: PTH116
            if stat.S_ISREG(status.st_mode):
                found.append(_File(one, status.st_size))
    except OSError as error:
        why = error.strerror or str(error)
        raise _refused(str(error.filename), why, "", error.errno or errno.EIO) from None
    if not found:
        raise _refused(path, "there is no file in it", "give a checkpoint", errno.ENOENT)
    return found


def archive(
    path: str,
    *,
    ask: bool = True,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[Progress], object] | None = None,
) -> Archived:
    """Let Lustre archive a file, or all files below a directory, and wait until they are archived.

    The files that make a checkpoint complete are requested after all others. Files that are in the
    archive already are not requested again.

    Args:
        path: The path of the file or directory.
        ask: False requests nothing; a file that is not archived is then an error.
        timeout_s: The seconds without progress after which the call gives up.
        progress: Is called with a Progress at intervals. An exception in it ends the call, but not
            the requests that Lustre has accepted.

    Returns:
        An Archived.

    Raises:
        StorageError: A file is not archived, is not on Lustre, or may not be archived.
    """
    begin = time.monotonic()
    files = _files(path)
    work = _Work(path, files, timeout_s, progress)
    markers = MARKERS.values()
    for is_last in (False, True):
        part = [one for one in files if (os.path.basename(one.path) in markers) == is_last]  # noqa: PTH119
        work.archive(part, ask=ask)
    total_s = time.monotonic() - begin
    return Archived(path, len(files), work.total_bytes, work.new_bytes, total_s)


class _Work:
    def __init__(
        self,
        path: str,
        files: list[_File],
        timeout_s: float,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._progress = progress
        self.total_bytes = sum(one.n_bytes for one in files)
        self._done_bytes = 0
        #: bytes that were archived during this call
        self.new_bytes = 0

    def archive(self, files: list[_File], *, ask: bool) -> None:
        """Request some files, and wait until they are archived."""
        left = []
        for file in files:
            flags = _flags_of(file.path)
            if _is_archived(flags):
                self._done_bytes += file.n_bytes
                continue
            if not ask:
                why = "it has changed since" if flags & _DIRTY else "it was never archived"
                remedy = "run this without --check, or wait until it is archived"
                sentence = f'"{file.path}" is not in the archive as it is now: {why}'
                raise failure(-errno.ENODATA, sentence, file.path, "archive", remedy=remedy)
            for mark, (why, command) in _MARKS.items():
                if flags & mark:
                    raise _refused(file.path, why, f'{command} "{file.path}"', errno.EPERM)
            _ask_for(file.path)
            left.append(file)
        self._tell(self._done_bytes)
        self._wait(left)

    def _wait(self, left: list[_File]) -> None:
        pause, seen, changed = _FIRST_LOOK_S, self._done_bytes, time.monotonic()
        while left:
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S)
            left = self._look(left)
            now = self._done_bytes + self._under_way(left)
            if now != seen:
                seen, changed = now, time.monotonic()
            elif time.monotonic() - changed > self._timeout_s:
                raise self._stalled(left)
            self._tell(now)

    def _look(self, files: list[_File]) -> list[_File]:
        """Return the files that are not archived yet, and count the others."""
        left = []
        for file in files:
            if _is_archived(_flags_of(file.path)):
                self._done_bytes += file.n_bytes
                self.new_bytes += file.n_bytes
            else:
                left.append(file)
        # Rotate the list, so that the next look asks about other files.
        return left[_MOST_ACTIONS:] + left[:_MOST_ACTIONS]

    def _under_way(self, files: list[_File]) -> int:
        """Return the bytes of unfinished files that have been copied.

        Raises:
            StorageError: Lustre has given up on a file.
        """
        total = 0
        for file in files[:_MOST_ACTIONS]:
            is_wanted, n_bytes = _action_of(file.path)
            total += min(n_bytes, file.n_bytes)
            # The action may have ended since the file's flags were read, so read them again.
            if not is_wanted and not _is_archived(flags := _flags_of(file.path)):
                raise self._failed(file.path, flags)
        return total

    def _failed(self, path: str, flags: int) -> StorageError:
        if flags & _DIRTY:
            remedy = "run this again after the writer has ended"
            return _refused(path, "another process is writing to it", remedy, errno.EBUSY)
        remedy = "see the log of the copytool (FSx: the event log of the data repository)"
        return _refused(path, "Lustre failed, or the request was canceled", remedy, errno.EIO)

    def _stalled(self, left: list[_File]) -> StorageError:
        why = (
            f"nothing was archived for {self._timeout_s:g} s, and it waits with "
            f"{len(left) - 1} more"
        )
        remedy = (
            "check that a copytool runs, and what it does (lfs hsm_action FILE); run this again, "
            "which repeats no request"
        )
        return _refused(left[0].path, why, remedy, errno.ETIMEDOUT)

    def _tell(self, done_bytes: int) -> None:
        if self._progress is not None:
            done = min(done_bytes, self.total_bytes)
            self._progress(Progress("archive", done, self.total_bytes))
