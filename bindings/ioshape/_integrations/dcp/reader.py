# SPDX-License-Identifier: Apache-2.0
"""FileSystemReader, with reads of ours."""

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


# A part of a tensor that has no more is verified by reading all of it: where DCP has written the
# file, the checksum is that of the whole.
_SMALL_BYTES = 1 << 20


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU."""
    address = ffi.cast("char *", tensor.data_ptr())
    return memoryview(ffi.buffer(address, tensor.numel() * tensor.element_size())).cast("B")


class _Stored:
    """A tensor as torch.save has put it into a data file."""

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
        """Fills a contiguous tensor of the CPU from this row on."""
        row_bytes = math.prod(self.shape[1:]) * self._item_bytes
        offset, view = self._offset + first * row_bytes, _memory(into)
        record = self._record
        if not view.nbytes:
            return
        if view.nbytes < record.n_bytes <= _SMALL_BYTES:
            # In files of DCP's own the checksum is that of all of it.
            whole = bytearray(record.n_bytes)
            self._reader.read_file(record.file_offset, memoryview(whole))
            view[:] = whole[offset : offset + view.nbytes]
            return
        self._reader.read_file(record.file_offset + offset, view)

    def _bring_rows(self, first: int, target: torch.Tensor) -> bool:
        """The same on a device; False if it has no pinned memory."""
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
        """Fills the target with what lies from these offsets on."""
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
    """Places in data files that one rank reads, and no other."""


def _is_contiguous(tensor: Tensor) -> bool:
    stride = 1
    for length, one in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if length != 1 and one != stride:
            return False
        stride *= length
    return True


class Reader(filesystem.FileSystemReader):
    """Loads checkpoints of torch.distributed.checkpoint, and verifies them on the way.

    For dcp.load(), as FileSystemReader, whose files it reads. Tensors are read straight into those
    of the state dict: only what this rank needs, in the order of the files. Checksums are compared:
    those of whole tensors, and where a part is read those of each MiB, if we have written the file.
    `.metadata` is untrusted input: it can name what describes a checkpoint, and nothing else.

    Args:
        path: of the checkpoint.
        args: as for FileSystemReader.
        kwargs: as for FileSystemReader.

    Raises:
        DamagedError: (in dcp.load()) a checksum is wrong; the message names the tensor.
        FormatError: (in dcp.load()) .metadata is no description of a checkpoint.
    """

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """Of the checkpoint; or of this rank, if each has its own."""
        metadata = description.load(self._get_metadata_path(kwargs.get("rank")))
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells each rank what no other one reads: that goes past the page cache."""
        plans = super().prepare_global_plan(plans)
        if len(plans) == 1:  # ranks that do not talk to each other may all read the same
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
        """Reads what this rank needs."""
        left = []
        # A planner may have made a plan of its own, which does not say.
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
        """All that is wanted of one item of a file. What is returned is for DCP's own reader."""
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
    """None if it is more than numbers in a row: a quantized tensor, one of a subclass, ..."""
    tensors, _problem = tensors_of(reader, reader.records())
    if len(tensors) != 1 or tensors[0].name or not hasattr(torch, tensors[0].dtype):
        return None
    stored = _Stored(reader, tensors[0])
    if not stored.is_plain or stored.dtype.is_complex:
        return None
    return stored
