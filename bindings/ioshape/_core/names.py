# SPDX-License-Identifier: Apache-2.0
"""Names of files and directories that are not complete yet."""

from __future__ import annotations

import re

#: part of the name of each temporary file that is renamed when it is complete
UNDER_WAY = ".ioshape-tmp-"
_ATTEMPT = re.compile(r"\.step-\d{10,20}\..+")  # the temporary directory of a group's checkpoint


def is_unfinished(name: str) -> bool:
    """Return whether a name is that of an unfinished file or directory.

    Its writer may still be at work, or may have died.
    """
    return UNDER_WAY in name or _ATTEMPT.fullmatch(name) is not None
