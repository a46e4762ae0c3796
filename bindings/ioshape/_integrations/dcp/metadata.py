# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint's .metadata file without running any code of it.

The file is untrusted. The pickle machine that reads it knows no class and no function, so nothing
in the file reaches an object of the process. This module creates the objects of a description with
their constructors, after it has checked the values of their fields.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections import OrderedDict
from enum import Enum
from functools import partial
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ioshape._formats.pickle_machine import BUILTINS, SETS, Global, Machine, is_count, lengths_of
from ioshape._group.dcp_contents import ALARMS, check_alarms, check_file_name, read_description

if TYPE_CHECKING:
    from collections.abc import Callable


# ---- Types of fields ----------------------------------------------------------------------------


_ITEMS = {metadata.TensorStorageMetadata, metadata.BytesStorageMetadata}
_PROPERTIES: set[type] = {metadata.TensorProperties, sharded.TensorProperties}
_ENUMERATIONS: dict[tuple[str, str], type[Enum]] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (sharded.MEM_FORMAT_ENCODING, getattr(metadata, "_MEM_FORMAT_ENCODING", None))
    if kind is not None
}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)
_NONE = type(None)
_PATH: set[type] = {str, *_PATHS, _NONE}

#: The classes that describe a checkpoint, and the types of each field. A number counts bytes or
#: elements. Items of lists and dicts are checked at the end, because the pickle may still change
#: them.
_KNOWN: dict[type, dict[str, set[type]]] = {
    Metadata: {
        "state_dict_metadata": {dict},
        "storage_meta": {metadata.StorageMeta, _NONE},
        "version": {str, _NONE},
    },
    MetadataIndex: {"fqn": {str}, "offset": {torch.Size, _NONE}, "index": {int, _NONE}},
    metadata.BytesStorageMetadata: {},
    metadata.ChunkStorageMetadata: {"offsets": {torch.Size}, "sizes": {torch.Size}},
    metadata.TensorStorageMetadata: {
        "properties": _PROPERTIES,
        "size": {torch.Size},
        "chunks": {list, tuple},
    },
    metadata.StorageMeta: {
        "checkpoint_id": _PATH,
        "save_id": _PATH,
        "load_id": _PATH,
        "modules": {list, tuple},
    },
    filesystem._StorageInfo: {
        "relative_path": {str},
        "offset": {int},
        "length": {int},
        "transform_descriptors": {list, tuple, _NONE},
    },
    filesystem._StoragePrefix: {"prefix": {str}},
}
#: All fields of the classes in this version of torch; None: a field of any type.
_FIELDS: dict[type, dict[str, set[type] | None]] = {
    kind: {one.name: kinds.get(one.name) for one in dataclasses.fields(kind)}
    for kind, kinds in _KNOWN.items()
}
_KINDS = {(kind.__module__, kind.__qualname__): kind for kind in {*_FIELDS, *_PROPERTIES}}


# ---- Objects that calls in the pickle create ----------------------------------------------------


def _layout(name: Any) -> torch.layout:
    found = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
    if not isinstance(found, torch.layout):
        raise UnpicklingError("it has a layout that is not valid")
    return found


def _path(kind: type[pathlib.PurePath], *parts: Any) -> pathlib.PurePath:
    if not all(type(part) is str for part in parts):
        raise UnpicklingError("it has a path that is not valid")
    return kind(*parts)


def _member(kind: type[Enum], value: Any) -> Enum:
    if type(value) is not int:
        raise UnpicklingError("it has a value of an enumeration that is not valid")
    return kind(value)


def _attribute(kind: Any, name: Any) -> Enum:
    """Return a member of an enumeration, which some versions of Python pickle as getattr()."""
    found = _ENUMERATIONS.get((kind.module, kind.name)) if type(kind) is Global else None
    if found is None or type(name) is not str or name not in found.__members__:
        raise UnpicklingError(
            "it names builtins.getattr, which does not belong in a checkpoint's metadata"
        )
    return found[name]


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): lambda *lengths: torch.Size(lengths_of(*lengths)),
    ("torch.serialization", "_get_layout"): _layout,
    **{(module, "getattr"): _attribute for module in BUILTINS},
    ("collections", "OrderedDict"): _ordered_dict,
    **{name: partial(_member, kind) for name, kind in _ENUMERATIONS.items()},
    **{
        (module, name): partial(_path, kind)
        for module in ("pathlib", "pathlib._local")
        for names, kind in zip(
            (("Path", "PosixPath"), ("PurePath", "PurePosixPath")), _PATHS, strict=True
        )
        for name in names
    },
}


def _trusted() -> dict[tuple[str, str], type]:
    """Return the classes that the program has declared as safe for torch.load, by name."""
    get = getattr(torch.serialization, "get_safe_globals", list)
    return {(one.__module__, one.__qualname__): one for one in get() if isinstance(one, type)}


# ---- Reading ------------------------------------------------------------------------------------


class _Machine(Machine):
    plain_keys = Machine.plain_keys | {torch.dtype}

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._trusted = _trusted()
        self._trusted_kinds = set(self._trusted.values())
        #: objects without fields so far, by id; the reference keeps the id from being reused
        self._unbuilt: dict[int, Any] = {}

    def describe(self) -> Metadata:
        """Return the description in the file."""
        found = self.read()
        if type(found) is not Metadata or self._unbuilt:
            raise UnpicklingError("it does not hold DCP metadata")
        _check(found)
        return found

    def find(self, module: str, name: str) -> Any:
        """Return what a global name of the pickle stands for; refuse names of other things."""
        path = (module, name)
        if path in _KINDS:
            has_fields = _FIELDS.get(_KINDS[path], True)
            make = self._empty if has_fields else object.__new__
            return Global(module, name, partial(make, _KINDS[path]))
        if path in _MAKERS:
            return Global(module, name, _MAKERS[path])
        if path in SETS:
            return Global(module, name, partial(self.new_set, kind=SETS[path]))
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if path in self._trusted:
            kind: Any = self._trusted[path]
            return Global(module, name, kind, partial(kind.__new__, kind))
        raise UnpicklingError(
            f"it names {module[:100]}.{name[:100]}, which does not belong in a checkpoint's "
            "metadata"
        )

    def _empty(self, kind: type) -> Any:
        made: Any = object.__new__(kind)
        self._unbuilt[id(made)] = made
        return made

    def build(self, to: Any, state: Any) -> None:
        """Give an object its fields, once, if their types are valid."""
        if self._unbuilt.pop(id(to), None) is not None:
            if type(to) in _PROPERTIES:
                self._build_properties(to, state)
            else:
                self._build_fields(to, state)
        elif type(to) in self._trusted_kinds:
            _give_state(to, state)
        elif type(to) not in _FIELDS or state:
            super().build(to, state)

    def _build_fields(self, to: Any, state: Any) -> None:
        known = _FIELDS[type(to)]
        if type(state) is not dict:
            raise UnpicklingError(f"{type(to).__name__} has a state that is not valid")
        # A field that this version of torch does not know belongs to a newer version.
        fields = {}
        for name, kinds in known.items():
            if name not in state:
                continue
            value = fields[name] = state[name]
            if kinds is None:
                continue
            if type(value) not in kinds or (type(value) is int and not is_count(value)):
                raise UnpicklingError(f"{type(to).__name__}.{name} has a value that is not valid")
        to.__init__(**fields)
        if type(to) is Metadata and ALARMS in state:
            setattr(to, ALARMS, check_alarms(state[ALARMS]))

    def _build_properties(self, to: Any, state: Any) -> None:
        kinds = (torch.dtype, torch.layout, bool, Enum, bool)
        is_right = type(state) is tuple and len(state) == len(kinds)
        if not is_right or not all(map(isinstance, state, kinds)):
            raise UnpicklingError(f"{type(to).__name__} has a state that is not valid")
        to.__setstate__(state)

    def check_key(self, key: Any) -> None:
        """Refuse a key that is slow to hash. The hash of an index is that of a tuple of numbers."""
        if type(key) is MetadataIndex and id(key) not in self._unbuilt:
            self.count_hash(key)
        else:
            super().check_key(key)

    # Classes that the program trusts may do anything.

    def set_other_items(self, to: Any, values: list[Any]) -> None:
        """Set items of an object that is not a dict."""
        if type(to) in self._trusted_kinds:
            for key, value in zip(values[::2], values[1::2], strict=True):
                to[key] = value
        else:
            super().set_other_items(to, values)

    def append(self, to: Any, values: list[Any]) -> None:
        """Append values to a list."""
        if type(to) in self._trusted_kinds:
            to.extend(values)
        else:
            super().append(to, values)


def _check(found: Metadata) -> None:
    """Refuse a description whose containers hold values of wrong types."""
    seen: dict[int, Any] = {}

    def check(values: Any, *kinds: type) -> None:
        if id(values) not in seen:  # many objects may share a list
            seen[id(values)] = values
            if not {type(value) for value in values} <= {*kinds}:
                raise UnpicklingError("it has a list or dict whose members are not valid")

    check(found.state_dict_metadata.keys(), str)
    check(found.state_dict_metadata.values(), *_ITEMS)
    for item in found.state_dict_metadata.values():
        if type(item) is metadata.TensorStorageMetadata:
            check(item.chunks, metadata.ChunkStorageMetadata)
    for info in (found.storage_data or {}).values():
        if type(info) is filesystem._StorageInfo:
            check(getattr(info, "transform_descriptors", None) or (), str)
    for name in files_of(found):
        check_file_name(name)
    if found.storage_meta is not None:
        check(found.storage_meta.modules, str)


def _give_state(to: Any, state: Any) -> None:
    """Give an object of a trusted class its state, as pickle does."""
    setstate = getattr(to, "__setstate__", None)
    if setstate is not None:
        setstate(state)
        return
    plain, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    to.__dict__.update(plain or {})
    for name, value in (slots or {}).items():
        setattr(to, name, value)


def load(path: str | os.PathLike[str]) -> Metadata:
    """Return the description of a checkpoint from its .metadata file.

    Raises:
        FormatError: The file is not a description, or contains names that no description needs.
        StorageError: The file could not be read.
    """
    remedy = (
        "if you trust it, and your planner has put a class there, pass that class to "
        "torch.serialization.add_safe_globals() first"
    )
    found: Metadata = read_description(
        os.fspath(path), "load", lambda file: _Machine(file).describe(), remedy
    )
    return found


def name_of(index: MetadataIndex) -> str:
    """Return the name of an item in alarms, with the offset of a shard that has one."""
    offset = index.offset
    return f"{index.fqn}{list(offset)}" if offset and any(offset) else index.fqn


def files_of(metadata: Metadata) -> set[str]:
    """Return the names of the data files that a description refers to."""
    return {
        info.relative_path
        for info in (metadata.storage_data or {}).values()
        if hasattr(info, "relative_path")
    }
