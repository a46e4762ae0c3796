# SPDX-License-Identifier: Apache-2.0
"""DCP's own writer and reader replaced, for code that names them or gives a path alone."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem

from ioshape._dcp.reader import Reader
from ioshape._dcp.writer import Writer
from ioshape._run.patch import replace

_StockWriter, _StockReader = filesystem.FileSystemWriter, filesystem.FileSystemReader


class _Kind(type(_StockWriter)):  # type: ignore[misc] # of the metaclass only this is known
    """Of classes that stand where one of DCP's stood.

    To call one makes one of ours. To derive from it derives from DCP's: such classes write files of
    their own, as those for other filesystems do. To ask whether something is one asks the same.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if any(isinstance(base, _Kind) for base in bases):
            theirs: Any = tuple(base.theirs if isinstance(base, _Kind) else base for base in bases)
            return type(theirs[0])(name, theirs, names)
        return super().__new__(cls, name, bases, names)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return cls.ours(*arguments, **named)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.theirs)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.theirs)


def _stand_in(ours: type, theirs: type) -> Any:
    """With the name, the class methods and the documentation of theirs."""
    names = {key: getattr(theirs, key) for key in ("__module__", "__qualname__", "__doc__")}
    return _Kind(theirs.__name__, (ours,), {**names, "ours": ours, "theirs": theirs})


_PAIRS = [
    (_StockWriter, _stand_in(Writer, _StockWriter)),
    (_StockReader, _stand_in(Reader, _StockReader)),
]
_count = 0


def patch() -> None:
    """From now on they are ours, in all modules that have them."""
    global _count  # noqa: PLW0603
    _count += 1
    replace(_PAIRS)


def unpatch() -> None:
    """Undoes the last patch()."""
    global _count  # noqa: PLW0603
    _count -= 1
    if not _count:
        replace([(new, old) for old, new in _PAIRS])
