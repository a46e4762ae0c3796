# SPDX-License-Identifier: Apache-2.0
"""List and remove the DCP checkpoints of a directory whose names differ in a number: step-1000.

Nothing in the checkpoints is run or imported, and torch is not imported either.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ioshape._core.errors import PassedOver, StorageError, failure, is_our_fault
from ioshape._core.family import numbered
from ioshape._formats.dcp_names import DATA, DESCRIPTION
from ioshape._group.dcp_contents import is_checkpoint, items
from ioshape._native import lib
from ioshape._save.directory import Directory, sync

if TYPE_CHECKING:
    from collections.abc import Iterator


# An unreadable directory with such a name may be the newest checkpoint. Others, such as "job-4711",
# may belong to another user.
_OF_CHECKPOINTS = re.compile(r"(step|epoch|iter|iteration|checkpoint|ckpt)[-_=.]?[0-9]+$", re.I)


@dataclass(frozen=True)
class Member:
    """A complete checkpoint of a family."""

    step: int
    path: str
    saved: datetime
    ranks: int
    files: int
    n_bytes: int


def _step_of(name: str) -> int | None:
    """Return the number in "step-1000", "epoch_3", "checkpoint500"; None for "best"."""
    found = numbered(name)
    return None if found is None or found.suffix else found.number


def prefix_of(path: str) -> str | None:
    """Return the name of a checkpoint without its number; None if it belongs to no family."""
    found = numbered(os.path.basename(path))  # noqa: PTH119
    return None if found is None or found.suffix else found.prefix


def may_be_checkpoint(name: str) -> bool:
    """Return whether an unreadable directory of that name is taken for a checkpoint."""
    return _OF_CHECKPOINTS.search(name) is not None


def cannot_look(where: str, path: str, error: OSError) -> StorageError:
    """Return the exception for a load from `where` that cannot read this path."""
    sentence = f'cannot load "{where}": cannot look at "{path}": {error.strerror}'
    return failure(-(error.errno or errno.EIO), sentence, path, "load")


def listed(directory: str) -> list[str]:
    """Return the names in a directory, sorted; none if there is no such directory.

    Raises:
        StorageError: The directory cannot be read.
    """
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_look(directory, directory, error) from None


def _paths(directory: str) -> list[tuple[str, StorageError | None]]:
    """Return the directories that have a .metadata file, newest first.

    If two have one time, the higher step comes first. Directories that cannot be read come before
    all others, each with the reason: one of them may be the newest checkpoint.
    """
    found, closed = [], []
    for name in listed(directory):
        path = os.path.join(directory, name)  # noqa: PTH118
        step = _step_of(name)
        if step is None:
            continue
        try:
            found.append((_saved_ns(path), step, path))
        except PermissionError as error:
            if may_be_checkpoint(name):
                closed.append((path, cannot_look(directory, path, error)))
        except OSError:  # no .metadata, or removed just now
            continue
    return [*closed, *((path, None) for _saved, _step, path in sorted(found, reverse=True))]


def _saved_ns(path: str) -> int:
    return os.stat(os.path.join(path, DESCRIPTION)).st_mtime_ns  # noqa: PTH116, PTH118


def look(path: str) -> Member:
    """Describe one checkpoint without reading its data files.

    Raises:
        StorageError: The checkpoint is damaged: .metadata is invalid, or a file is shorter than
            .metadata says. Or it could not be read.
    """
    ends: dict[str, int] = {}
    for item in items(path, "load"):
        for chunk in item.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.n_bytes)
    n_bytes = sum(_file_bytes(path, name, end) for name, end in ends.items())
    ranks = {match[1] for match in map(DATA.fullmatch, ends) if match}
    return Member(
        step=_step_of(os.path.basename(path)) or 0,  # noqa: PTH119
        path=path,
        saved=datetime.fromtimestamp(_saved_ns(path) / 1e9, tz=timezone.utc),
        ranks=len(ranks),
        files=len(ends),
        n_bytes=n_bytes,
    )


def _file_bytes(path: str, name: str, end: int) -> int:
    file = os.path.join(path, name)  # noqa: PTH118
    try:
        n_bytes = os.stat(file).st_size  # noqa: PTH116
    except OSError as error:
        code = -(error.errno or errno.EIO)
        sentence = f'cannot load "{path}": "{name}" is missing: {error.strerror}'
        raise failure(code, sentence, file, "load") from None
    if n_bytes < end:
        sentence = f'"{file}" is damaged: it has {n_bytes} bytes, but {end} were saved'
        raise failure(lib.IOSHAPE_E_DAMAGED, sentence, file, "load")
    return n_bytes


def newest_first(directory: str) -> Iterator[tuple[str, Member | StorageError]]:
    """Yield the path of each checkpoint, and its description or why it is not complete."""
    for path, closed in _paths(directory):
        if closed is not None:
            yield path, closed
            continue
        try:
            yield path, look(path)
        except StorageError as error:
            if is_checkpoint(path):  # otherwise it was removed just now
                yield path, error


def newest(directory: str) -> tuple[Member | None, list[PassedOver]]:
    """Return the newest complete checkpoint, and the newer ones that are not complete.

    Raises:
        StorageError: This process could not read a checkpoint that may be complete.
    """
    passed_over: list[PassedOver] = []
    for path, one in newest_first(directory):
        if isinstance(one, Member):
            return one, passed_over
        if is_our_fault(one):
            raise one
        passed_over.append(PassedOver(path, one))
    return None, passed_over


def members(directory: str) -> tuple[list[Member], list[tuple[str, StorageError]]]:
    """Return the complete checkpoints, oldest first, and the others with their reasons."""
    found = list(newest_first(directory))[::-1]
    complete = [one for _path, one in found if isinstance(one, Member)]
    return complete, [(path, one) for path, one in found if isinstance(one, StorageError)]


def remove(
    directory: str,
    *,
    keep_last: int,
    keep_every: int = 0,
    dry_run: bool = False,
    prefix: str | None = None,
) -> list[Member]:
    """Remove the checkpoints that are not to be kept, oldest first, and return them.

    Their directories are removed with all contents. With `prefix`, only checkpoints whose names are
    this prefix and a number count.
    """
    complete, _damaged = members(directory)
    if prefix is not None:
        complete = [one for one in complete if prefix_of(one.path) == prefix]
    going = [one for one in complete[:-keep_last] if not keep_every or one.step % keep_every]
    for one in () if dry_run else going:
        _remove(one.path)
    return going


def _remove(path: str) -> None:
    """Remove a checkpoint so that readers see all of it or none.

    The directory is first renamed to the name of a dead process's leftover, which a later cleanup
    would remove.
    """
    with Directory(path) as hidden:
        os.rename(path, hidden.path)  # noqa: PTH104
        sync(os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120
        shutil.rmtree(hidden.path, ignore_errors=True)
