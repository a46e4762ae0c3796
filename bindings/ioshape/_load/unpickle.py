# SPDX-License-Identifier: Apache-2.0
"""torch.load(), while Python's garbage collector rests.

None of the objects that are made is garbage, but the collector would look at all of them again and
again: that is a fifth of the time of many small tensors. It is for files of ours to read: what
comes through a pipe may take its time.
"""

from __future__ import annotations

import gc
import os
from typing import Any

from ioshape import _torch as original

#: an entry for each load that has stopped it
_resting: list[None] = []


def load(*arguments: Any, **named: Any) -> Any:
    """As torch.load()."""
    if not gc.isenabled():
        return original.load(*arguments, **named)
    try:
        _resting.append(None)
        gc.disable()
        return original.load(*arguments, **named)
    finally:
        gc.enable()
        del _resting[-1:]  # a child has none


def _in_child() -> None:
    """Who forks beside a load, as DataLoader does, gets a collector that works."""
    if _resting:
        _resting.clear()
        gc.enable()


os.register_at_fork(after_in_child=_in_child)
