# SPDX-License-Identifier: Apache-2.0
"""torch.load(), while Python's garbage collector rests.

It is for files of ours to read: what comes through a pipe may take its time.
"""

from __future__ import annotations

from typing import Any

from ioshape import _torch as original
from ioshape._load.collector import collector_rests


def load(*arguments: Any, **named: Any) -> Any:
    """As torch.load()."""
    with collector_rests():
        return original.load(*arguments, **named)
