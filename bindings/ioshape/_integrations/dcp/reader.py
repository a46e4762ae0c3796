# SPDX-License-Identifier: Apache-2.0
"""Read checkpoints of torch.distributed.checkpoint: Reader replaces DCP's FileSystemReader."""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.futures import Future

from ioshape._core.errors import DamagedError, StorageError
from ioshape._device.incoming import Incoming
from ioshape._device.stream import bytes_of, changed
from ioshape._device.stretches import Wanted
from ioshape._integrations.dcp import metadata as description
from ioshape._load.contents import tensors_of
from ioshape._load.reader import Reader as ZipReader
from ioshape._load.reader import can_read
from ioshape._native import ffi

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from ioshape._load.pickled import Tensor


# A tensor of at most this size is read as a whole if only a part is wanted. DCP's own files have
# one checksum for the whole tensor, which can then be verified.
_SMALL_BYTES = 1 << 20


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, as a view."""
    address = ffi.cast("char *", tensor.data_ptr())
    return memoryview(ffi.buffer(address, tensor.numel() * tensor.element_size())).cast("B")


class _Stored:
    """A tensor that torch.save or ioshape.save has stored in a data file."""

    def __init__(self, reader: ZipReader, tensor: Tensor) -> None:
        self._reader = reader
        self.dtype: torch.dtype = getattr(torch, tensor.dtype)
        self.shape = tensor.shape
        self._record = next(one for one in reader.records() if one.name == tensor.record)
        self._item_bytes = torch.empty(0, dtype=self.dtype).element_size()
        self._offset = tensor.storage_offset
        n_bytes = math.prod(self.shape) * self._item_bytes
        self.is_plain = _is_contiguous(tensor) and self._offset + n_bytes <= self._record.n_bytes

    def _read_rows(self, first: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor on the CPU with rows from this one on."""
        row_bytes = math.prod(self.shape[1:]) * self._item_bytes
        offset, view = self._offset + first * row_bytes, _memory(into)
        record = self._record
        if not view.nbytes:
            return
        if view.nbytes < record.n_bytes <= _SMALL_BYTES:
            # In DCP's own files the checksum covers the whole record.
            whole = bytearray(record.n_bytes)
            self._reader.read_file(record.file_offset, memoryview(whole))
            view[:] = whole[offset : offset + view.nbytes]
            return
        self._reader.read_file(record.file_offset + offset, view)

    def _bring_rows(self, first: int, target: torch.Tensor) -> bool:
        """Fill a tensor on a device with rows; return False if that has no pinned memory."""
        incoming = Incoming(target.nbytes)
        if target.nbytes < _SMALL_BYTES or not incoming.takes(target.device):
            return False
        record, reader = self._record, self._reader
        row_bytes = math.prod(self.shape[1:]) * self._item_bytes
        begin = target.storage_offset() * self._item_bytes
        incoming.add(
            Wanted(
                record.file_offset + self._offset + first * row_bytes,
                bytes_of(target.untyped_storage())[begin : begin + target.nbytes],
                lambda: changed(target),
                reader.crc32_of_all(record) if target.nbytes == record.n_bytes else None,
                lambda: reader.damaged(record),
            )
        )
        incoming.bring(reader.read_file)
        return True

    def read_part(self, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill the target with the part of the tensor that begins at these offsets."""
        lengths = tuple(target.shape)
        first, count = (offsets[0], lengths[0]) if offsets else (0, 1)
        is_same = target.dtype == self.dtype and self.shape[1:] == lengths[1:]
        if is_same and target.is_contiguous():
            if self._bring_rows(first, target):
                return
            if target.device.type == "cpu":
                self._read_rows(first, target)
                return
        rows = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        self._read_rows(first, rows)
        for dim in range(1, len(lengths)):
            rows = rows.narrow(dim, offsets[dim], lengths[dim])
        target.copy_(rows.view(lengths) if not lengths else rows)


class _Alone(frozenset[tuple[str, int]]):
    """Positions in data files that only one rank reads."""


def _is_contiguous(tensor: Tensor) -> bool:
    stride = 1
    for length, one in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if length != 1 and one != stride:
            return False
        stride *= length
    return True


class Reader(filesystem.FileSystemReader):
    """A reader of checkpoints for dcp.load() that verifies what it reads.

    It takes the place of FileSystemReader and reads the same files. It reads only what this rank
    needs, in the order of the files, directly into the tensors of the state dict. It compares the
    checksums of whole tensors. In files that ioshape has written, it also compares those of each
    MiB of a part. `.metadata` is untrusted input: it can name only types that describe a
    checkpoint.

    Args:
        path: The directory of the checkpoint.
        args: As for FileSystemReader.
        kwargs: As for FileSystemReader.

    Raises:
        DamagedError: (in dcp.load()) A checksum is wrong. The message names the tensor.
        FormatError: (in dcp.load()) .metadata is not a description of a checkpoint.
    """

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint, or of this rank if each rank has its own.

        Args:
            _args: Ignored.
            kwargs: `rank`, if each rank has its own metadata.

        Raises:
            FormatError: .metadata is not a description of a checkpoint.
            StorageError: .metadata could not be read.
        """
        metadata = description.load(self._get_metadata_path(kwargs.get("rank")))
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell each rank what only it reads, because such bytes need not go through the page cache.

        Args:
            plans: The plans of all ranks.

        Returns:
            The plans with that information.
        """
        plans = super().prepare_global_plan(plans)
        if len(plans) == 1:  # without collectives, all ranks may read the same bytes
            return plans
        places = [{self._place(item) for item in plan.items} for plan in plans]
        readers = collections.Counter(itertools.chain.from_iterable(places))
        alone = [_Alone(one for one in its if readers[one] == 1) for its in places]
        return [
            dataclasses.replace(plan, storage_data=its)
            for plan, its in zip(plans, alone, strict=True)
        ]

    def _place(self, item: ReadItem) -> tuple[str, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the data that this rank needs.

        Args:
            plan: This rank's plan.
            planner: The planner that provides the tensors to fill.

        Returns:
            A completed future.

        Raises:
            DamagedError: A checksum is wrong. The message names the tensor.
            StorageError: A file could not be read.
        """
        left = []
        # A planner may have replaced the plan by one without that information.
        alone = plan.storage_data if isinstance(plan.storage_data, _Alone) else _Alone()
        items = sorted(plan.items, key=self._place)
        for place, requests in itertools.groupby(items, key=self._place):
            left += self._read(list(requests), planner, place in alone)
        if left:
            return super().read_data(LoadPlan(left), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, requests: list[ReadItem], planner: LoadPlanner, is_alone: bool
    ) -> list[ReadItem]:
        """Read all that is wanted of one item in a file; return the requests left for DCP."""
        info = self.storage_data[requests[0].storage_index]
        if getattr(info, "transform_descriptors", None) or not info.length:
            return requests
        path = os.path.join(self.path, info.relative_path)  # noqa: PTH118
        part = (info.offset, info.length)
        try:
            reader = ZipReader(path, part=part, fresh=False, shared=False if is_alone else None)
        except StorageError as error:
            if can_read(error):
                raise self._named(error, requests) from None
            return requests
        with reader:
            try:
                return self._read_item(reader, requests, planner)
            except StorageError as error:
                raise self._named(error, requests) from None

    def _read_item(
        self, reader: ZipReader, requests: list[ReadItem], planner: LoadPlanner
    ) -> list[ReadItem]:
        left = []
        stored: _Stored | None = None
        for request in requests:
            if request.type == LoadItemType.BYTE_IO:
                data = bytearray(reader.file_bytes)
                reader.read_file(0, memoryview(data))
                planner.load_bytes(request, io.BytesIO(data))
                continue
            stored = stored or _stored(reader)
            if stored is None:
                left.append(request)
                continue
            target = planner.resolve_tensor(request).detach()
            if tuple(target.shape) != tuple(request.lengths):
                raise AssertionError(
                    f"req {request.storage_index} mismatch sizes {target.size()} vs "
                    f"{request.lengths}"
                )
            stored.read_part(tuple(request.storage_offsets), target)
            planner.commit_tensor(request, target)
        return left

    def _named(self, error: StorageError, requests: list[ReadItem]) -> StorageError:
        if not isinstance(error, DamagedError):
            return error
        name = requests[0].storage_index.fqn
        return DamagedError(
            error.facts._replace(sentence=f"{error.sentence}, which holds '{name}'")
        )


def _stored(reader: ZipReader) -> _Stored | None:
    """Return the tensor in an archive; None if it is quantized, of a subclass, or complex."""
    tensors, _problem = tensors_of(reader, reader.records())
    if len(tensors) != 1 or tensors[0].name or not hasattr(torch, tensors[0].dtype):
        return None
    stored = _Stored(reader, tensors[0])
    if not stored.is_plain or stored.dtype.is_complex:
        return None
    return stored
