# SPDX-License-Identifier: Apache-2.0
"""Read tensors of a safetensors file into new or given memory, and verify them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ioshape._core.text import one_line
from ioshape._device.incoming import Incoming, Wanted
from ioshape._device.stream import changed, memory_on_device
from ioshape._load.contents import data_of, header_of, tensor_of
from ioshape._load.reader import Reader, Request
from ioshape._load.stored import StoredTensor, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ioshape._formats.safetensors import Entry


class File:
    """An open safetensors file."""

    def __init__(self, filename: str | os.PathLike[str], device: Any = "cpu") -> None:
        self.path: str = os.fspath(filename)
        self.device: torch.device = torch.device(device)
        self._reader = Reader(self.path, any_format=True)
        try:
            header = header_of(self._reader)
        except BaseException:
            self._reader.close()
            raise
        #: tensors in the order of the file
        self.entries: dict[str, Entry] = {entry.name: entry for entry in header.entries}
        self.metadata: dict[str, str] | None = header.metadata
        self._data = data_of(header, self._reader.file_bytes)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._reader.close()

    def stored(self, entry: Entry) -> StoredTensor:
        """Return a tensor that has not been read yet."""
        return StoredTensor(self._reader, tensor_of(entry, self._data), self._data)

    def tensors(
        self,
        entries: Iterable[Entry] | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors, all in the order of the file by default; fill the given ones in place."""
        entries = list(self.entries.values() if entries is None else entries)
        given = into or {}
        for entry in entries:
            if entry.name in given:
                self._check(entry, given[entry.name])
        brought = self._bring_to_devices(entries, given)
        left = [entry for entry in entries if entry.name not in brought]
        if self.device.type == "cpu":
            brought |= self._read(left, given)
        for entry in entries:
            # For other devices, the CPU's memory holds only one tensor at a time.
            tensor = brought.pop(entry.name, None)
            yield entry.name, self._read([entry], given)[entry.name] if tensor is None else tensor

    def _read(
        self, entries: list[Entry], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Read tensors in one pass: nothing is read twice, and the storage is never idle."""
        found = {entry.name: self._target_of(entry, given.get(entry.name)) for entry in entries}
        if self._reader.is_torch_zip:  # by its last bytes it is a zip, too
            for entry in entries:
                if found[entry.name].nbytes:
                    self._reader.read_file(entry.begin, memory_of(found[entry.name]))
        else:
            self._reader.read_records(
                [
                    Request(0, entry.begin, entry.end - entry.begin, found[entry.name].data_ptr())
                    for entry in entries
                ]
            )
        for name, tensor in found.items():
            into = given.get(name)
            if into is None:
                found[name] = tensor.to(self.device)
            elif into is tensor:
                changed(into)
            else:
                with torch.no_grad():
                    found[name] = into.copy_(tensor)
        return found

    def _target_of(self, entry: Entry, given: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor into which an entry is read."""
        if given is not None and given.device.type == "cpu" and given.is_contiguous():
            return given
        return self._new(entry)

    def _new(self, entry: Entry, device: torch.device | None = None) -> torch.Tensor:
        stored = self.stored(entry)
        return torch.empty(stored.shape, dtype=stored.dtype, device=device or "cpu")

    def _bring_to_devices(
        self, entries: Iterable[Entry], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Read the tensors that can use pinned memory to a device; return them by name."""
        incoming = Incoming(self._reader.file_bytes)
        new_on = torch.empty(0, device=self.device).device  # includes the device's number
        brought = {}
        for entry in entries:
            into = given.get(entry.name)
            if not incoming.takes(new_on if into is None else into.device):
                continue
            if into is None:
                into = self._new(entry, new_on)
            if into.is_contiguous():
                memory = memory_on_device(into)
                incoming.add(Wanted(entry.begin, memory, partial(changed, into)))
                brought[entry.name] = into
        incoming.bring(self._reader.read_file)
        return brought

    def _check(self, entry: Entry, into: torch.Tensor) -> None:
        stored = self.stored(entry)
        if into.dtype != stored.dtype or tuple(into.shape) != stored.shape:
            raise ValueError(
                f"tensor '{one_line(entry.name)}' of {self.path} has dtype {stored.dtype} and "
                f"shape {stored.shape}, but the tensor to fill has {into.dtype} and "
                f"{tuple(into.shape)}"
            )


class Slice:
    """A tensor of which parts can be read, as safe_open.get_slice() returns it."""

    def __init__(self, file: File, entry: Entry) -> None:
        self._file = file
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype in the format, such as "F32"."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the tensor, with an index as for a tensor. Only that part is read."""
        return self._file.stored(self._entry)[index].to(self._file.device)
