# SPDX-License-Identifier: Apache-2.0
"""Placement of loaded storages in new memory, on the CPU or on devices, by map_location.

torch.load creates the object with storages that are allocated and not touched. Storages for a
device then get memory there, and their bytes are read through pinned buffers. The bytes of all
others are read into the memory that torch has allocated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ioshape._device.stream import bytes_of
from ioshape._load.unread import Unread, UnreadFile, tensors_in, unread_object

if TYPE_CHECKING:
    from collections.abc import Iterable


_new_storage: Any = torch.UntypedStorage


class Placement:
    """Destinations of storages, by the rules of torch's map_location."""

    def __init__(self, map_location: Any, file: UnreadFile) -> None:
        self._asked = map_location
        self._file = file
        self._incoming = file.incoming()
        self._tags: dict[int, str] = {}
        self._devices: dict[Any, torch.device] = {}

    def defer(self, storage: Any, tag: str) -> Any:
        """Record the tag of a storage and leave it in place. torch.load gets this as map_location.

        Raises:
            TypeError: The tensor is for the device "meta", which has no memory.
        """
        if not callable(self._asked) and str(self._location(tag)).startswith("meta"):
            raise TypeError("ioshape does not move tensors to meta")
        self._tags[storage._cdata] = tag
        return storage

    def defer_known(self, storage: Any, tag: str) -> Any:
        """Record the tag of a storage as defer() does, if bring() can move it to its device.

        Raises:
            Exception: torch must place the storage itself, or raise the right error.
        """
        device = self._device_for(tag)
        if device.type != "cpu" and not self._incoming.takes(device):
            raise TypeError(f"ioshape does not move tensors to {device}")
        return self.defer(storage, tag)

    def _location(self, tag: str) -> Any:
        if isinstance(self._asked, Mapping):
            return self._asked.get(tag, tag)
        return tag if self._asked is None else str(self._asked)

    def _device_for(self, tag: str) -> torch.device:
        """Return torch's device for a tag. Do not call it if map_location is a function."""
        location = self._location(tag)
        if location not in self._devices:
            # torch's own function knows registered types of devices, and "the current device".
            empty = _new_storage(0, device="cpu")
            moved_storage: Any = _default(empty, location)
            self._devices[location] = moved_storage.device
        return self._devices[location]

    def _move(self, storage: torch.UntypedStorage) -> Any:
        """Place a storage whose bytes have been read, as torch does."""
        tag = self._tags.get(storage._cdata, "cpu")
        if callable(self._asked):
            moved_storage = self._asked(storage, tag)
            return moved_storage if moved_storage is not None else _default(storage, tag)
        if self._device_for(tag) == storage.device:
            return storage
        return _default(storage, self._location(tag))

    def _on_device(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return new memory on the device; None if the CPU must read the bytes first."""
        if callable(self._asked):
            return None
        device = self._device_for(self._tags[storage._cdata])
        if not self._incoming.takes(device):
            return None
        new: torch.UntypedStorage = _new_storage(storage.nbytes(), device=device)
        return new

    def bring(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read the unread storages and move them. Tensors that share memory still share it."""
        # List each tensor once, because a tensor that is moved has another storage afterwards.
        listed = list({id(tensor): tensor for tensor in tensors}.values())
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in listed}
        moved: dict[int, Any] = {}
        here: list[Unread] = []
        for key, storage in storages.items():
            record = self._file.unread.get(storage.data_ptr()) if storage.nbytes() else None
            if record is None:
                continue
            there = self._on_device(storage)
            if there is None:
                here.append(Unread(record, storage.data_ptr()))
            else:
                moved[key] = there
                self._incoming.add(self._file.wanted(record, bytes_of(there)))
        self._file.bring(here, self._incoming)
        for key, storage in storages.items():
            if key not in moved:
                moved[key] = self._move(storage)
        for tensor in listed:
            key = tensor.untyped_storage()._cdata
            if moved[key] is not storages[key]:
                _move(tensor, moved[key])


def _move(tensor: torch.Tensor, storage: Any) -> None:
    """Move a tensor to another storage with equal bytes."""
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    moved = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        moved = moved.conj()
    if tensor.is_neg():
        moved = torch._neg_view(moved)
    tensor.data = moved


def _default(storage: torch.UntypedStorage, location: str) -> Any:
    restore: Any = torch.serialization.default_restore_location
    return restore(storage, location)


class Plan:
    """The plan of a load: which storages are read, and to where. This one reads all to new memory.

    All of that memory is known before it is filled. So several threads can fill it, in huge pages,
    and storages for a device are read to it directly.
    """

    #: whether all storages are read
    is_whole = True
    #: whether all storages get new memory
    is_new = True

    def __init__(self, map_location: Any) -> None:
        self._map_location = map_location
        #: names of existing tensors whose content may have changed
        self.changed: list[str] = []

    def read(self, file: UnreadFile) -> tuple[Any] | None:
        """Read what is wanted, and return the result; None if torch must read the whole file."""
        placement = Placement(self._map_location, file)
        found = unread_object(file, placement.defer_known)
        if found is None:
            return None
        placement.bring(found[1])
        return found[:1]

    def finish(self, loaded: Any, _path: str) -> Any:
        """Return the result for an object that torch has loaded completely."""
        return loaded


# ---- load(only=...) ------------------------------------------------------------------------------
#
# load(only=...): parts of an object.
#
# torch.load creates the object without the bytes of large storages. Then the parts that are not
# wanted are left out, and the bytes of the rest are read.


class Only(Plan):
    """The plan of load(only=...)."""

    is_whole = False

    def __init__(self, only: Iterable[str], map_location: Any) -> None:
        super().__init__(map_location)
        if isinstance(only, str):
            raise TypeError("only takes a list of names, not one name")
        each = [".*".join(map(re.escape, name.split("*"))) for name in only]
        self._wanted = re.compile("|".join(each) or "(?!)", re.DOTALL)

    def read(self, file: UnreadFile) -> tuple[Any] | None:
        """Read the storages of the wanted parts."""
        placement = Placement(self._map_location, file)
        unread = unread_object(file, placement.defer)
        if unread is None:
            return None
        found = self.finish(unread[0], file.name)
        placement.bring(tensors_in(found))
        return (found,)

    def finish(self, loaded: Any, path: str) -> Any:
        """Return the parts of an object that match, with the containers around them.

        Raises:
            ValueError: Nothing matches.
        """
        found = _picked(loaded, self._wanted, "", ())
        if found is _NOTHING:
            raise ValueError(
                f'cannot load a part of "{path}": nothing in it has a name that was given; '
                "ioshape.inspect() lists the names of its tensors"
            )
        return found


def join_names(name: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{name}[{key!r}]"
    return f"{name}.{key}" if name else key


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
