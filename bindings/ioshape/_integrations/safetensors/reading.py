# SPDX-License-Identifier: Apache-2.0
"""Read tensors of a safetensors file into new or given memory, and verify them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ioshape._core.text import one_line
from ioshape._device.incoming import Incoming, Wanted
from ioshape._device.stream import bytes_of, changed
from ioshape._formats import safetensors as header
from ioshape._load.reader import Request
from ioshape._load.stored import memory_of, of_safetensors
from ioshape._load.verified import VerifiedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ioshape._formats.safetensors import Entry
    from ioshape._load.stored import StoredTensor


class File:
    """An open safetensors file."""

    def __init__(self, filename: str | os.PathLike[str], device: Any = "cpu") -> None:
        self.path: str = os.fspath(filename)
        self.device: torch.device = torch.device(device)
        self._file = VerifiedFile(self.path)
        try:
            file_bytes = self._file.seek(0, os.SEEK_END)
            self._file.seek(0)
            self._header = header.read(self._file, file_bytes, self.path)
        except BaseException:
            self._file.close()
            raise
        self.entries: dict[str, Entry] = {entry.name: entry for entry in self._header.entries}
        self.metadata: dict[str, str] | None = self._header.metadata

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def stored(self, entry: Entry) -> StoredTensor:
        """Return a tensor that has not been read yet."""
        return of_safetensors(self._file._reader, entry)

    def read(self, entry: Entry) -> torch.Tensor:
        """Read a whole tensor to the device."""
        brought = self._bring_to_devices([entry], {})
        return brought[entry.name] if brought else self.stored(entry)[...].to(self.device)

    def tensors(
        self, into: Mapping[str, torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors in the order of the file; fill the given ones in place."""
        given = into or {}
        for entry in self._header.entries:
            if entry.name in given:
                self._check(entry, given[entry.name])
        brought = self._bring_to_devices(self._header.entries, given)
        left = [entry for entry in self._header.entries if entry.name not in brought]
        if self.device.type == "cpu":
            brought |= self._read(left, given)
        for entry in self._header.entries:
            # For other devices, the CPU's memory holds only one tensor at a time.
            tensor = brought.pop(entry.name, None)
            yield entry.name, self._read([entry], given)[entry.name] if tensor is None else tensor

    def _read(
        self, entries: list[Entry], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        targets = [self._target_of(entry, given.get(entry.name)) for entry in entries]
        self._bring(entries, targets)
        return {
            entry.name: _put(target, given[entry.name])
            if entry.name in given
            else target.to(self.device)
            for entry, target in zip(entries, targets, strict=True)
        }

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
        incoming = Incoming(self._header.entries[-1].end if self._header.entries else 0)
        new_on = torch.empty(0, device=self.device).device  # includes the device's number
        brought = {}
        for entry in entries:
            into = given.get(entry.name)
            if not incoming.takes(new_on if into is None else into.device):
                continue
            if into is None:
                into = self._new(entry, new_on)
            if into.is_contiguous():
                begin = into.storage_offset() * into.element_size()
                memory = bytes_of(into.untyped_storage())[begin : begin + into.nbytes]
                incoming.add(Wanted(entry.begin, memory, partial(changed, into)))
                brought[entry.name] = into
        incoming.bring(self._file._reader.read_file)
        return brought

    def _check(self, entry: Entry, into: torch.Tensor) -> None:
        stored = self.stored(entry)
        if into.dtype != stored.dtype or tuple(into.shape) != stored.shape:
            raise ValueError(
                f"tensor '{one_line(entry.name)}' of {self.path} has dtype {stored.dtype} and "
                f"shape {stored.shape}, but the tensor to fill has {into.dtype} and "
                f"{tuple(into.shape)}"
            )

    def _bring(self, entries: list[Entry], tensors: list[torch.Tensor]) -> None:
        """Read all tensors in one pass: nothing is read twice, and the storage is never idle."""
        reader = self._file._reader
        if reader.is_torch_zip:  # by its last bytes it is a zip, too
            for entry, tensor in zip(entries, tensors, strict=True):
                if tensor.nbytes:
                    reader.read_file(entry.begin, memory_of(tensor))
            return
        reader.read_records(
            [
                Request(0, entry.begin, entry.end - entry.begin, tensor.data_ptr())
                for entry, tensor in zip(entries, tensors, strict=True)
            ]
        )


def _put(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Move what was read to its target, unless it was read there."""
    if tensor is target:
        changed(target)
    else:
        with torch.no_grad():
            target.copy_(tensor)
    return target


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
