# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages, replaced wherever a module has them."""

from __future__ import annotations

import sys
from typing import Any


def replace(pairs: list[tuple[Any, Any]]) -> None:
    """Puts the second of each pair wherever a module has the first: `from torch import save`."""
    by_id = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        # Our own modules must go on reaching the originals.
        if module is None or name == "ioshape" or name.startswith("ioshape."):
            continue
        # Not getattr(): modules that load others lazily would do so.
        contents = getattr(module, "__dict__", None)
        if not isinstance(contents, dict):
            continue
        # There are thousands of modules, and few have one: those without cost little.
        if by_id.keys().isdisjoint(map(id, contents.values())):
            continue
        for key, value in list(contents.items()):
            if id(value) in by_id:
                contents[key] = by_id[id(value)]
