# SPDX-License-Identifier: Apache-2.0
"""What all users have on a tier, as an operator looks at it: from names and times alone."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ioshape._native import ffi, lib
from ioshape._tier.tier import is_locked

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """One for each user who has something there. Raises OSError: it cannot be looked at."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _OWN.fullmatch(entry.name)
            if name and entry.is_dir(follow_symlinks=False):
                journal = Path(entry.path, "journal")
                if journal.exists():
                    found.append(_tier(folder, int(name[1]), journal))
    return sorted(found, key=lambda one: one.user)


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
    root = journal.parent
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
    path = lib.ioshape_py_journal_path(os.fsencode(name), kept, drained)
    return (os.fsdecode(ffi.string(path)), bool(drained[0])) if path else ("", False)


def _sizes(place: str) -> Iterator[int]:
    """Of a file, or of all in a directory."""
    try:
        yield os.lstat(place).st_size
    except OSError:
        return
    for folder, _folders, names in os.walk(place):
        for name in names:
            try:
                yield os.lstat(f"{folder}/{name}").st_size
            except OSError:  # it has been drained since
                continue
