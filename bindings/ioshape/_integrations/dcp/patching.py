# SPDX-License-Identifier: Apache-2.0
"""Replace DCP's writer and reader in code that names them, or that gives only a path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem, state_dict_saver

from ioshape._core.locks import module_lock
from ioshape._core.replacing import replace
from ioshape._integrations.dcp import staging
from ioshape._integrations.dcp.reader import Reader
from ioshape._integrations.dcp.writer import Writer
from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from types import ModuleType

_StockWriter, _StockReader = filesystem.FileSystemWriter, filesystem.FileSystemReader


class _Kind(type(_StockWriter)):  # type: ignore[misc] # mypy knows only that it is a metaclass
    """The metaclass of the stand-ins for DCP's classes.

    Calling a stand-in creates an object of ioshape's class. Deriving from it derives from DCP's
    class, because derived classes write files of their own, for example to other filesystems.
    isinstance() and issubclass() ask DCP's class.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if any(isinstance(base, _Kind) for base in bases):
            theirs: Any = tuple(base.theirs if isinstance(base, _Kind) else base for base in bases)
            return type(theirs[0])(name, theirs, names)
        return super().__new__(cls, name, bases, names)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        return cls.ours(*arguments, **named)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.theirs)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.theirs)


def _stand_in(ours: type, theirs: type) -> Any:
    """Return a stand-in with the name and the documentation of DCP's class.

    It is derived from neither class. In issubclass(), ABCMeta asks all subclasses of a class, so a
    derived stand-in and DCP's class would ask each other without end.
    """
    names = {key: getattr(theirs, key) for key in ("__module__", "__qualname__", "__doc__")}
    return _Kind(theirs.__name__, (), {**names, "ours": ours, "theirs": theirs})


_WRITER: tuple[Any, Any] = (_StockWriter, _stand_in(Writer, _StockWriter))
_READER: tuple[Any, Any] = (_StockReader, _stand_in(Reader, _StockReader))

# dcp.async_save() with a path alone creates one of these, which copies to new memory. Older
# versions of torch have none. Stagers that a program creates stay as they are.
_StockStager: Any = getattr(state_dict_saver, "DefaultStager", object)


class _Stager(_StockStager):  # type: ignore[misc] # whatever it is
    """A stager that copies as Writer does."""

    def stage(self, state_dict: Any, **named: Any) -> Any:
        own = staging.copy_of(state_dict)
        return super().stage(state_dict, **named) if own is None else own


def _let_stage(stager: Any) -> None:
    if hasattr(state_dict_saver, "DefaultStager"):
        state_dict_saver.DefaultStager = stager


_lock = module_lock()
_loads: list[bool] = []  # for each active patch(), whether it also replaced the reader


def patch(*, load: bool = True) -> None:
    """Replace DCP's classes by ioshape's, also in modules that have imported them already."""
    with _lock:
        _loads.append(load)
        replace([_WRITER, _READER] if load else [_WRITER])
        _let_stage(_Stager)


def unpatch() -> None:
    """Undo the last patch()."""
    with _lock:
        _loads.pop()
        if not _loads:
            _let_stage(_StockStager)
        kept = [] if not _loads else [_WRITER]
        kept += [_READER] if any(_loads) else []
        replace([(new, old) for old, new in (_WRITER, _READER) if (old, new) not in kept])


def follow(_module: ModuleType, *, load: bool) -> None:
    """Patch DCP. "ioshape run" calls this when torch.distributed.checkpoint has been imported."""
    if is_tested("torch"):
        patch(load=load)
