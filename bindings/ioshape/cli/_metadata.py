# SPDX-License-Identifier: Apache-2.0
"""Operations that a filesystem's metadata servers were asked for, where it tells everybody.

Lustre counts them for each client, where its files of statistics can be read; stripefs, which plays
Lustre in the tests, in an extended attribute of its root.
"""

from __future__ import annotations

import glob
import json
import os
import re
from pathlib import Path

_STATISTICS = "user.stripefs.statistics"
_MOST_BYTES = 1 << 20

#: where Lustre has its folder mdc
_LUSTRE_FOLDERS = ("proc/fs/lustre", "sys/fs/lustre", "sys/kernel/debug/lustre")

Counts = dict[str, int]


def counts(folder: Path) -> Counts | None:
    """By kind of operation, since some moment; None where nobody tells."""
    root = _root_of(folder.absolute())
    try:
        text = os.getxattr(root, _STATISTICS).decode()
    except OSError:
        return _of_lustre(root)
    return of_stripefs(text)


def of_stripefs(text: str) -> Counts | None:
    """From its JSON: the object "metadata"."""
    try:
        found = json.loads(text)["metadata"]
        return {str(name): int(count) for name, count in found.items() if name != "total"}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _root_of(folder: Path) -> Path:
    while not folder.is_mount():
        folder = folder.parent
    return folder


def _of_lustre(root: Path) -> Counts | None:
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    name = lustre_name(mounts, root)
    return of_lustre(name) if name else None


def of_lustre(name: str, machine: Path = Path("/")) -> Counts | None:
    """Of all metadata servers of the filesystem of this name, and of no other one's."""
    total: Counts = {}
    for folder in _LUSTRE_FOLDERS:
        for path in (machine / folder).glob(f"mdc/{glob.escape(name)}-MDT*/md_stats"):
            try:
                text = path.read_text(encoding="ascii", errors="replace")
            except OSError:
                continue
            for kind, count in of_md_stats(text).items():
                total[kind] = total.get(kind, 0) + count
        if total:
            return total
    return None


def lustre_name(mounts: str, root: Path) -> str:
    """The name of the filesystem at this mount point, by mountinfo; "" if it is not Lustre."""
    name = ""
    for line in mounts.splitlines():
        words = line.split(" ")
        if "-" not in words or len(words) < 10 or _unescaped(words[4]) != str(root):
            continue
        kind, source, *_ = words[words.index("-") + 1 :]
        # Such as 10.0.0.1@tcp:10.0.0.2@tcp:/scratch/of/a/team. The last mount lies above others.
        rest = _unescaped(source).rpartition(":/")[2]
        name = rest.partition("/")[0] if kind == "lustre" else ""
    return name


def _unescaped(word: str) -> str:
    """The kernel writes blanks, tabs, newlines and backslashes as \\040 and so on."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def of_md_stats(text: str) -> Counts:
    """Lines such as "create  17 samples [reqs]"; the first ones are times."""
    found: Counts = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and words[2] == "samples" and words[1].isdecimal():
            found[words[0]] = int(words[1])
    return found


def difference(before: Counts, after: Counts) -> Counts:
    """What came in between."""
    found = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in found.items() if count > 0}


class Counter:
    """Counts what others ask for, not what asking costs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        first = counts(folder)
        self._before = counts(folder) if first is not None else None
        self._asking = (
            difference(first, self._before)
            if first is not None and self._before is not None
            else {}
        )

    def since(self) -> Counts | None:
        """Since this was made; None if nobody tells."""
        after = counts(self._folder)
        if after is None or self._before is None:
            return None
        return difference(self._asking, difference(self._before, after))
