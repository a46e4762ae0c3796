# SPDX-License-Identifier: Apache-2.0
"""Operations that a filesystem's metadata servers were asked for, where it tells everybody.

Lustre counts them for each client, where its files of statistics can be read; stripefs, which plays
Lustre in the tests, in an extended attribute of its root.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

_STATISTICS = "user.stripefs.statistics"
_MOST_BYTES = 1 << 20

#: of Lustre's md_stats
_LUSTRE_FILES = (
    "/proc/fs/lustre/mdc/*/md_stats",
    "/sys/fs/lustre/mdc/*/md_stats",
    "/sys/kernel/debug/lustre/mdc/*/md_stats",
)

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
    total: Counts = {}
    if not _is_lustre(root):
        return None
    for pattern in _LUSTRE_FILES:
        for path in Path("/").glob(pattern[1:]):
            try:
                text = path.read_text(encoding="ascii", errors="replace")
            except OSError:
                continue
            for name, count in of_md_stats(text).items():
                total[name] = total.get(name, 0) + count
        if total:
            return total
    return None


def _is_lustre(root: Path) -> bool:
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 6 and words[4] == str(root):
            return "lustre" in words[words.index("-") + 1 :][:1]
    return False


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
