# SPDX-License-Identifier: Apache-2.0
"""Placement of loaded storages in new memory, on the CPU or on devices, by map_location.

torch.load creates the object with storages that are allocated and not touched. Storages for a
device then get memory there, and their bytes are read through pinned buffers. The bytes of all
others are read into the memory that torch has allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ioshape._device.stream import bytes_of
from ioshape._load.unread import Unread, UnreadFile, failures_of, unread_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._core.report import Progress
    from ioshape._load.reader import Reader
    from ioshape._load.together import Together

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


def load_at_once(
    reader: Reader,
    map_location: Any,
    progress: Callable[[Progress], object] | None,
    part: tuple[int, int] | None,
    together: Together | None = None,
) -> tuple[Any] | None:
    """Return the object in new memory, all of which is known before it is filled.

    So several threads can fill it, in huge pages, and storages for a device are read to it
    directly. Return None if torch must read one tensor after the other.
    """
    if callable(map_location):
        return None  # the function may look at the bytes
    file = UnreadFile(reader, progress, together=together)
    placement = Placement(map_location, file)
    with failures_of(file, part):
        found = unread_object(file, placement.defer_known)
        if found is None:
            return None
        placement.bring(found[1])
    return found[:1]
