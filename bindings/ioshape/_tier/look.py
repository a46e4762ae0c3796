# SPDX-License-Identifier: Apache-2.0
"""What all users have on a tier, as an operator looks at it: from names and times alone."""

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
    """What one user has on a tier."""

    folder: str
    #: as a number
    user: int
    #: destinations for which something waits
    waiting: int
    waiting_bytes: int
    #: how long the longest of them has waited
    oldest_s: float
    is_draining: bool
    #: when the last one of those that are still there was drained, in seconds since 1970; 0: none
    drained_s: float


def tiers_at(folder: str) -> list[Tier]:
    """Look at what each user has there. Raises OSError: the folder cannot be looked at.

    A user's own folder that cannot be looked at does not hide the others. One that belongs to
    another user than it is named after is no tier.
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
    """Links are not followed: they would lead an operator's look to where their user wants."""
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
        except OSError:  # it has gone on, or is none of the journal's
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
    """The destination of an entry of a journal, and whether it is drained; "": it is none."""
    kept, drained = ffi.new("char[]", os.fsencode(text)), ffi.new("int *")
    path = lib.tier_path_of_entry(os.fsencode(name), kept, drained)
    return (os.fsdecode(ffi.string(path)), bool(drained[0])) if path else ("", False)


def _sizes(place: str) -> Iterator[int]:
    """Yield the size of a file, or of each file in a directory; links are not followed."""
    try:
        size = os.lstat(place).st_size
    except OSError:
        return
    above = os.path.dirname(place)  # noqa: PTH120
    if os.path.realpath(above) != above:
        return
    yield size
    for folder, _folders, names in os.walk(place):
        for name in names:
            try:
                yield os.lstat(f"{folder}/{name}").st_size
            except OSError:  # it has been drained since
                continue
