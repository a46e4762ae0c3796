# SPDX-License-Identifier: Apache-2.0
"""Replacement of functions of other packages, and copies of them that call ioshape."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def replace(pairs: list[tuple[Any, Any]]) -> None:
    """Replace functions in all loaded modules, also where `from torch import save` copied them.

    Each pair is the old and the new function.
    """
    by_id = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        # ioshape's own modules must still reach the originals.
        if module is None or name == "ioshape" or name.startswith("ioshape."):
            continue
        # Do not use getattr(): modules that load others lazily would load them.
        contents = getattr(module, "__dict__", None)
        if not isinstance(contents, dict):
            continue
        # There are thousands of modules, and few of them hold such a function. This test is cheap
        # for the others.
        if by_id.keys().isdisjoint(map(id, contents.values())):
            continue
        for key, value in list(contents.items()):
            if id(value) in by_id:
                contents[key] = by_id[id(value)]


def with_ours(function: Any, module: ModuleType, **ours: Any) -> Any:
    """Return a copy of a function in which some global names refer to other functions.

    `ours` has the new functions by name. The copy keeps the checks of whatever version is
    installed, and the original stays unchanged for other callers. Raise ImportError if the function
    does not use one of the names.
    """
    missing = set(ours) - set(function.__code__.co_names)
    if missing:
        raise ImportError(
            f"{module.__name__}.{function.__name__}() of this version does not call "
            f"{', '.join(sorted(missing))}(), which ioshape needs; install another version "
            f"of {module.__name__.partition('.')[0]}"
        )
    made = FunctionType(
        function.__code__,
        {**vars(module), **ours},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
