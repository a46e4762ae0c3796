# SPDX-License-Identifier: Apache-2.0
"""What files and directories are called until they are complete."""

from __future__ import annotations

import re

#: in the name of what appears whole
UNDER_WAY = ".ioshape-tmp-"
_ATTEMPT = re.compile(r"\.step-\d{10,20}\..+")  # of a generation


def is_unfinished(name: str) -> bool:
    """Whether it is being written, or was left by a dead process."""
    return UNDER_WAY in name or _ATTEMPT.fullmatch(name) is not None
