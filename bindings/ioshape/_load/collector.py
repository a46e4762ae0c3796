# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, stopped while a load makes objects.

None of these objects is garbage, but the collector would look at all of them again and again: that
is a fifth of the time of many small tensors, and most of the time of a large description.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: an entry for each load that has stopped it
_resting: list[None] = []


@contextlib.contextmanager
def collector_rests() -> Iterator[None]:
    """Stop the collector inside the block; a collector that the caller has stopped stays so."""
    if not gc.isenabled():
        yield
        return
    try:
        _resting.append(None)
        gc.disable()
        yield
    finally:
        gc.enable()
        del _resting[-1:]  # a child has none


def _in_child() -> None:
    """Start the collector of a child that was forked beside a load, as DataLoader does."""
    if _resting:
        _resting.clear()
        gc.enable()


os.register_at_fork(after_in_child=_in_child)
