# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages, replaced wherever a module has them."""

from __future__ import annotations

import sys
from typing import Any


def replace(pairs: list[tuple[Any, Any]]) -> None:
    """Puts the second of each pair wherever a module has the first: `from torch import save`."""
    for name, module in list(sys.modules.items()):
        # Our own modules must go on reaching the originals.
        if module is None or name == "ioshape" or name.startswith("ioshape."):
            continue
        # Not getattr(): modules that load others lazily would do so.
        contents = getattr(module, "__dict__", None)
        if not isinstance(contents, dict):
            continue
        for key, value in list(contents.items()):
            for old, new in pairs:
                if value is old:
                    contents[key] = new
