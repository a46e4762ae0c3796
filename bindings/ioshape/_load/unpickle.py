# SPDX-License-Identifier: Apache-2.0
"""torch.load() with Python's garbage collector paused.

Use it for regular files only: a read from a pipe may take long, and the collector would stay off.
"""

from __future__ import annotations

from typing import Any

from ioshape import _torch as original
from ioshape._load.collector import collector_rests


def load(*arguments: Any, **named: Any) -> Any:
    """Load as torch.load() does, with the garbage collector paused."""
    with collector_rests():
        return original.load(*arguments, **named)
