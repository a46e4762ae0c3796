# SPDX-License-Identifier: Apache-2.0
"""Names of unfinished files and directories, and families of names that differ in a number."""

from __future__ import annotations

import re
from typing import NamedTuple

#: part of the name of each temporary file that is renamed when it is complete
UNDER_WAY = ".ioshape-tmp-"
_ATTEMPT = re.compile(r"\.step-\d{10,20}\..+")  # the temporary directory of a group's checkpoint


def is_unfinished(name: str) -> bool:
    """Return whether a name is that of an unfinished file or directory.

    Its writer may still be at work, or may have died.
    """
    return UNDER_WAY in name or _ATTEMPT.fullmatch(name) is not None


# ---- Families ------------------------------------------------------------------------------------
#
# Families of checkpoint names, such as "step-100.pt" and "step-200.pt".
#
# The names of a family differ in their last number alone.

_NAME = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
_OF_SHARDS = re.compile(
    r"(?<![a-z])(rank|shard|part|node|worker|of|[tpdcem]p)[-_=.]?$", re.IGNORECASE
)


class Numbered(NamedTuple):
    """A file name, split around its last number."""

    prefix: str
    number: int
    suffix: str

    @property
    def counts_shards(self) -> bool:
        """True if the number distinguishes shards of one checkpoint: "step-100-rank-3.pt"."""
        return _OF_SHARDS.search(self.prefix) is not None

    @property
    def family(self) -> tuple[str, str]:
        """The prefix and the suffix that all names of the family share."""
        return self.prefix, self.suffix


def numbered(name: str) -> Numbered | None:
    """Split a name without directory. Return None if it is hidden or has no number."""
    match = None if name.startswith(".") else _NAME.fullmatch(name)
    return match and Numbered(match[1], int(match[2]), match[3])
