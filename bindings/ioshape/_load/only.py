# SPDX-License-Identifier: Apache-2.0
"""load(only=...): parts of an object.

torch.load creates the object without the bytes of large storages. Where the pickle names an unknown
class, an inert placeholder takes the object's place. Then the parts that are not wanted are left
out, and the bytes of the rest are read.
"""

from __future__ import annotations

import copy
import re
import types
from collections import OrderedDict
from functools import partial
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ioshape._formats.pickle_machine import SETS, Global, Inert, Machine, are_lengths
from ioshape._load import unpickle
from ioshape._load.into import join_names
from ioshape._load.places import Places
from ioshape._load.unread import UnreadFile, failures_of, is_native, tensors_in
from ioshape._load.verified import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._core.report import Progress
    from ioshape._load.reader import Reader

_OLD_NAMES = {"__builtin__": "builtins"}  # pickle protocol 2 uses the names of Python 2


# ---- Functions that a pickle of plain values may call -------------------------------------------


def _encoded(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise UnpicklingError("it encodes something that is not text")
    return text.encode("latin-1")


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> bytearray:
    if type(data) is str and encoding == "latin-1":
        return bytearray(data, "latin-1")
    if type(data) is not bytes:
        raise UnpicklingError("it makes a bytearray of something that is not bytes")
    return bytearray(data)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise UnpicklingError("it has a complex number that is not valid")
    return complex(real, imaginary)


def _size(lengths: Any) -> torch.Size:
    if not are_lengths(lengths):
        raise UnpicklingError("it has a shape that is not valid")
    return torch.Size(lengths)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise UnpicklingError("it has a device that is not valid")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


#: functions by module and name; torch looks up storages itself
_PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encoded,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): _complex,
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    **{
        ("torch._utils", name): getattr(torch._utils, name)
        for name in ("_rebuild_parameter", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
        if hasattr(torch._utils, name)
    },
}


class _Unpickler(Machine):
    """A safe replacement of pickle.Unpickler for torch.load.

    It creates a placeholder instead of an object of a class that is not plain.
    """

    plain_keys = Machine.plain_keys | {torch.dtype, torch.device, Inert}

    #: set by torch
    persistent_load: Callable[[Any], Any]

    def __init__(self, file: IO[bytes], **_: Any) -> None:
        super().__init__(file)

    def load(self) -> Any:
        """Return the object that the pickle describes."""
        return self.read()

    def find(self, module: str, name: str) -> Any:
        """Return the object for a name, by way of torch's override of find_class()."""
        return self.find_class(module, name)

    def find_class(self, module: str, name: str) -> Any:
        """Return the function for a name. torch overrides this and handles storages itself."""
        module = _OLD_NAMES.get(module, module)
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) in SETS:
            return Global(module, name, partial(self.new_set, kind=SETS[module, name]))
        return Global(module, name, _PLAIN.get((module, name), _left_out))

    def build(self, to: Any, state: Any) -> None:
        """Set the state of an object. An OrderedDict may have attributes, as state dicts do."""
        if type(to) is OrderedDict and type(state) is dict:
            to.__dict__.update(state)
        else:
            super().build(to, state)

    def refer(self, reference: Any) -> Any:
        """Return the storage for a persistent id."""
        return self.persistent_load(reference)


def _left_out(*_: Any, **__: Any) -> Inert:
    return Inert()


_module = types.ModuleType("ioshape_only")  # torch.load takes it as its pickle_module
_module.Unpickler = _Unpickler  # type: ignore[attr-defined]


class Only(NamedTuple):
    """The arguments `only`, as a pattern, and `map_location` of load()."""

    wanted: re.Pattern[str]
    map_location: Any


# ---- Selection of the wanted parts --------------------------------------------------------------


def patterns_of(only: Iterable[str] | None) -> re.Pattern[str] | None:
    """Return one pattern for names in which * matches any text; None if `only` is None."""
    if only is None:
        return None
    if isinstance(only, str):
        raise TypeError("only takes a list of names, not one name")
    each = [".*".join(map(re.escape, name.split("*"))) for name in only]
    return re.compile("|".join(each) or "(?!)", re.DOTALL)


_NOTHING = object()


def _picked(value: Any, wanted: re.Pattern[str], name: str, inside: tuple[int, ...]) -> Any:
    if wanted.fullmatch(name):
        return value
    if id(value) in inside:
        return _NOTHING  # the container contains itself
    inside = (*inside, id(value))
    if isinstance(value, dict):
        items = ((k, _picked(v, wanted, join_names(name, k), inside)) for k, v in value.items())
        kept = {key: item for key, item in items if item is not _NOTHING}
        if not kept:
            return _NOTHING
        same = copy.copy(value)  # keeps attributes, such as _metadata of a state dict
        same.clear()
        same.update(kept)
        return same
    if type(value) in (list, tuple):
        parts = (_picked(v, wanted, f"{name}[{i}]", inside) for i, v in enumerate(value))
        found = [part for part in parts if part is not _NOTHING]
        return type(value)(found) if found else _NOTHING
    return _NOTHING


def pick(loaded: Any, path: str, wanted: re.Pattern[str] | None) -> Any:
    """Return the parts of an object that match, with the containers around them.

    Raises:
        ValueError: Nothing matches.
    """
    found = loaded if wanted is None else _picked(loaded, wanted, "", ())
    if found is _NOTHING:
        raise ValueError(
            f'cannot load a part of "{path}": nothing in it has a name that was given; '
            "ioshape.inspect() lists the names of its tensors"
        )
    return found


# ---- Reading the wanted parts -------------------------------------------------------------------


def load_only(
    reader: Reader,
    torch_load: Callable[[Any], Any],
    progress: Callable[[Progress], object] | None,
    part: tuple[int, int] | None,
    only: Only,
) -> Any:
    """Return the wanted parts of an open file, or of a shard.

    If they contain more than tensors, containers and plain values, torch_load loads the whole file.
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
    """Return the wanted parts without large tensors' bytes; _NOTHING if they are not plain."""
    try:
        loaded = unpickle.load(
            cast("IO[bytes]", file), places.note, _module, weights_only=False, mmap=False
        )
    except Exception:  # torch.load loads the file then, and raises the error if there is one
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
