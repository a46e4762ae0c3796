# SPDX-License-Identifier: Apache-2.0
"""Retention of checkpoint files: keep the newest files of a family, remove the others.

A family is all files in a directory whose names differ only in their last number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ioshape._core.descriptors import open_file
from ioshape._core.errors import StorageError
from ioshape._core.names import numbered
from ioshape._core.under_way import canonical
from ioshape._load.reader import Reader

if TYPE_CHECKING:
    from ioshape._core.names import Numbered
    from ioshape._core.report import Report

_log = logging.getLogger("ioshape")


@dataclass(frozen=True)
class Kept:
    """A file of a family, with its status when it was examined."""

    name: str
    #: the last number in its name
    number: int
    n_bytes: int
    mtime_ns: int
    inode: int


def family_of(path: str) -> Numbered:
    """Split the name of a path around its last number.

    Raises:
        ValueError: The name has no number, or the number counts shards of one checkpoint.
    """
    name = os.path.basename(path)  # noqa: PTH119
    found = numbered(name)
    if found is None:
        raise ValueError(
            f'cannot find older checkpoints of "{name}": its name has no number; give it one, such '
            "as step-100.pt"
        )
    if found.counts_shards:  # retention would keep only the newest shards of one checkpoint
        raise ValueError(
            f'cannot find older checkpoints of "{name}": its last number counts files of one '
            "checkpoint; put the step after it, such as rank-3-step-100.pt"
        )
    return found


def check(path: str | None, keep_last: int) -> None:
    """Check, before anything is saved, that retention is possible.

    Raises:
        ValueError: `keep_last` is less than 1, or the path belongs to no family, or there is none.
    """
    if path is None:
        raise ValueError("keep_last takes a path, not a file object")
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise ValueError(f"keep_last is {keep_last!r}; give at least 1")
    family_of(path)


def after_save(report: Report, keep_last: int) -> None:
    """Remove the older files of a family after a save.

    Best effort: failures are logged as warnings.

    Args:
        report: The report of the save. Its file always stays.
        keep_last: The number of files to keep.
    """
    if report.skipped:
        return
    path, is_there = report.path, not report.tier
    try:
        directory, name = os.path.split(canonical(path))
        with _Family(directory, family_of(path)) as family:
            found = family.members()
            if is_there and all(one.name != name for one in found):
                _log.warning(
                    'checkpoints older than "%s" were not removed: it is not a torch zip', path
                )
                return
            family.remove([one for one in found[keep_last:] if one.name != name], found)
    except (OSError, ValueError) as error:  # the save itself has succeeded, so do not raise
        _log.warning('checkpoints older than "%s" were not removed: %s', path, error)


def prune(path: str, keep_last: int, *, dry_run: bool) -> tuple[list[Kept], list[Kept]]:
    """Remove all but the newest files of the family of `path`, oldest first.

    The newest file that stays is verified completely. Damaged files that are newer are neither
    removed nor counted.

    Returns:
        The files that stay, and those that were removed, or with `dry_run` would be.

    Raises:
        ValueError: The path belongs to no family.
        StorageError: A file could not be removed. All others were removed nevertheless.
    """
    directory = os.path.dirname(canonical(path))  # noqa: PTH120
    with _Family(directory, family_of(path)) as family:
        found = family.members()
        while found and not family.is_intact(found[0]):
            found = found[1:]
        kept, going = found[:keep_last], found[keep_last:]
        if not dry_run:
            family.remove(going, found)
    return kept, going


class _Family:
    """The files of a family in a directory, held open by descriptor in case it is renamed."""

    def __init__(self, directory: str, family: Numbered) -> None:
        self._directory = directory
        self._family = family.family
        self._fd = open_file(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> _Family:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def members(self) -> list[Kept]:
        """Return the complete checkpoints, newest first, in the order of load_latest().

        Symbolic links are left out, and so are files that are not torch zips with a directory at
        their end.
        """
        found = []
        for name in os.listdir(self._fd):  # noqa: PTH208
            parts = numbered(name)
            if parts is None or parts.family != self._family:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and self._is_checkpoint(name):
                    found.append(
                        Kept(name, parts.number, status.st_size, status.st_mtime_ns, status.st_ino)
                    )
        return sorted(found, key=lambda one: (one.mtime_ns, one.number), reverse=True)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)  # noqa: PTH118

    def _is_checkpoint(self, name: str) -> bool:
        try:
            with Reader(self._path(name)) as reader:
                return reader.is_torch_zip
        except StorageError:
            return False

    def is_intact(self, one: Kept) -> bool:
        """Return whether all checksums of a file match. Log a warning if not."""
        try:
            with Reader(self._path(one.name), operation="prune") as reader:
                reader.verify()
        except StorageError as error:
            _log.warning('keep_last does not count "%s": %s', self._path(one.name), error)
            return False
        return True

    def remove(self, going: list[Kept], found: list[Kept]) -> None:
        """Remove files, oldest first.

        The newest file that was found is synced before, so that it survives a crash.
        """
        if not going:
            return
        self._sync(found[0].name)
        failure: OSError | None = None
        for one in reversed(going):
            try:
                status = os.stat(one.name, dir_fd=self._fd, follow_symlinks=False)
                # Another save may have replaced the file since it was examined.
                if (status.st_ino, status.st_mtime_ns) == (one.inode, one.mtime_ns):
                    os.unlink(one.name, dir_fd=self._fd)
            except FileNotFoundError:  # another process has removed it first
                continue
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _sync(self, name: str) -> None:
        fd = open_file(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.fsync(self._fd)
