# SPDX-License-Identifier: Apache-2.0
"""Survey what all users have on a tier, for an operator, from names and times alone."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ioshape._native import ffi, lib
from ioshape._tier.tier import is_locked

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("ioshape")

_OWN = re.compile(r"ioshape-(\d+)")


@dataclass(frozen=True)
class Tier:
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


def tiers_at(folder: str) -> list[Tier]:
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
                    found.append(_tier(folder, int(name[1]), Path(entry.path, "journal")))
            except OSError as error:
                _log.info("cannot look at the tier %s: %s", entry.path, error.strerror)
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


def _tier(folder: str, user: int, journal: Path) -> Tier:
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
    return Tier(
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
