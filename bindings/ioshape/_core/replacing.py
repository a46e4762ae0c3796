# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages: replaced wherever a module has them, or made to call ours."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


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


def with_ours(function: Any, module: ModuleType, **ours: Any) -> Any:
    """A function of the package that calls ours instead of what it calls by these names.

    So its checks are its own, whatever the version has, and nothing is replaced for anybody else.
    """
    missing = set(ours) - set(function.__code__.co_names)
    if missing:
        raise ImportError(
            f"{module.__name__}.{function.__name__}() of this version does not call "
            f"{', '.join(sorted(missing))}(), through which ioshape works; install another version "
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
