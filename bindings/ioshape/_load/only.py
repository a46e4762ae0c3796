# SPDX-License-Identifier: Apache-2.0
"""load(only=...): the parts of an object that are asked for.

torch.load makes the object, but of large storages without their bytes, and where the pickle names
something that may be anything, with nothing in its place. Then what is not wanted is left out, and
of what is left the bytes are read.
"""

from __future__ import annotations

import copy
import pickle
import re
import types
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ioshape._files.verified import Source
from ioshape._load import unpickle
from ioshape._load.into import join_names
from ioshape._load.places import Places
from ioshape._load.unread import UnreadFile, failures_of, is_native, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._load.reader import Reader
    from ioshape._save.report import Progress

# What the pickle of a plain object names. (Storages torch looks up itself.)
_PLAIN = {
    ("_codecs", "encode"),
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
}
_OLD_NAMES = {"__builtin__": "builtins"}  # of protocol 2


class _Left:
    """In the place of an object whose class is not looked up, and of what that object makes."""

    def __new__(cls, *_: Any, **__: Any) -> _Left:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _take(self, *_: Any, **__: Any) -> _Left:
        return self

    __call__ = append = extend = add = __setitem__ = __setstate__ = _take


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _OLD_NAMES.get(module, module)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return super().find_class(module, name) if (module, name) in _PLAIN else _Left


_module = types.ModuleType("ioshape_only")  # what torch takes for one like pickle
_module.Unpickler = _Unpickler  # type: ignore[attr-defined]


class Only(NamedTuple):
    """What load() was asked for."""

    wanted: re.Pattern[str]
    map_location: Any


# ---- What is wanted -----------------------------------------------------------------------------


def patterns_of(only: Iterable[str] | None) -> re.Pattern[str] | None:
    """Names in which * stands for anything, as one pattern; None: all is wanted."""
    if only is None:
        return None
    if isinstance(only, str):
        raise TypeError("only is a list of names, not one name")
    each = [".*".join(map(re.escape, name.split("*"))) for name in only]
    return re.compile("|".join(each) or "(?!)", re.DOTALL)


_NOTHING = object()


def _picked(value: Any, wanted: re.Pattern[str], name: str, inside: tuple[int, ...]) -> Any:
    if wanted.fullmatch(name):
        return value
    if id(value) in inside:
        return _NOTHING  # it contains itself
    inside = (*inside, id(value))
    if isinstance(value, dict):
        items = ((k, _picked(v, wanted, join_names(name, k), inside)) for k, v in value.items())
        kept = {key: item for key, item in items if item is not _NOTHING}
        if not kept:
            return _NOTHING
        same = copy.copy(value)  # with what it has besides: _metadata of a state dict
        same.clear()
        same.update(kept)
        return same
    if type(value) in (list, tuple):
        parts = (_picked(v, wanted, f"{name}[{i}]", inside) for i, v in enumerate(value))
        found = [part for part in parts if part is not _NOTHING]
        return type(value)(found) if found else _NOTHING
    return _NOTHING


def pick(loaded: Any, path: str, wanted: re.Pattern[str] | None) -> Any:
    """What is wanted of an object, and the containers around it.

    Raises:
        ValueError: nothing of it is.
    """
    found = loaded if wanted is None else _picked(loaded, wanted, "", ())
    if found is _NOTHING:
        raise ValueError(
            f'cannot load a part of "{path}": nothing in it has a name that was given; '
            "ioshape.inspect() lists those of its tensors"
        )
    return found


# ---- Reading it ---------------------------------------------------------------------------------


def load_only(
    reader: Reader,
    torch_load: Callable[[Any], Any],
    progress: Callable[[Progress], object] | None,
    part: tuple[int, int] | None,
    only: Only,
) -> Any:
    """What is wanted of an open file, or of its part.

    If that is more than tensors, containers and plain values, torch_load loads all of the file.
    """
    file = UnreadFile(reader, progress, is_whole=False)
    places = Places(only.map_location, file)
    with failures_of(file, part):
        found = _plain(file, places, only.wanted)
        if found is not _NOTHING:
            places.bring(tensors_in(found))
            return found
    whole = Source(reader, progress)
    with failures_of(whole, part):
        loaded = torch_load(whole)
    return pick(loaded, reader.path, only.wanted)


def _plain(file: UnreadFile, places: Places, wanted: re.Pattern[str]) -> Any:
    """What is wanted, of which large tensors have no bytes yet; _NOTHING if there is more to it."""
    try:
        loaded = unpickle.load(
            cast("IO[bytes]", file), places.note, _module, weights_only=False, mmap=False
        )
    except Exception:  # whatever it is, torch.load will say it
        if file.failure is not None:
            raise file.failure from None
        return _NOTHING
    found = pick(loaded, file.name, wanted)
    try:
        for _ in tensors_in(found):
            pass
    except TypeError:
        return _NOTHING
    return found if is_native(file) else _NOTHING
