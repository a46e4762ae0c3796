# SPDX-License-Identifier: Apache-2.0
"""Read checkpoints of torch.distributed.checkpoint: Reader and load_latest()."""

from __future__ import annotations

import collections
import dataclasses
import errno
import io
import itertools
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.futures import Future

from ioshape._core.errors import (
    DamagedError,
    PassedOver,
    StorageError,
    damaged,
    failure,
    holding,
    is_our_fault,
    no_usable,
    warn_passed_over,
)
from ioshape._device.incoming import Incoming, Wanted
from ioshape._device.stream import changed, memory_on_device
from ioshape._group import dcp_contents as families
from ioshape._group.kinds import refuse_others
from ioshape._integrations.dcp import metadata as description
from ioshape._load.contents import contents_of
from ioshape._load.reader import open_if_ours
from ioshape._load.stored import in_record
from ioshape._save.items import Items

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from ioshape._load.reader import Reader as ZipReader
    from ioshape._load.reader import Record
    from ioshape._load.stored import StoredTensor


# A tensor of at most this size is read as a whole if only a part is wanted. DCP's own files have
# one checksum for the whole tensor, which can then be verified.
_SMALL_BYTES = 1 << 20


def _read_part(stored: StoredTensor, offsets: tuple[int, ...], target: torch.Tensor) -> None:
    """Fill the target with the part of a tensor that begins at these offsets."""
    record = stored._record
    assert record is not None
    index = tuple(
        slice(first, first + length) for first, length in zip(offsets, target.shape, strict=True)
    )
    part = stored._on_meta()[index]
    if part.shape != target.shape:
        why = f".metadata has another shape than record '{record.name}'"
        raise damaged(stored._reader.path, why, "load")
    is_same = target.dtype == stored.dtype
    if is_same and _bring(stored, record, part, target):
        return
    if target.nbytes < record.n_bytes <= _SMALL_BYTES:
        # In DCP's own files the checksum covers the whole record.
        target.copy_(stored[...][index])
    elif is_same and target.device.type == "cpu" and target.numel():
        stored._fill(target.view(part.dtype), part)
    else:
        target.copy_(stored[index])


def _bring(stored: StoredTensor, record: Record, part: torch.Tensor, target: torch.Tensor) -> bool:
    """Fill a tensor on a device through pinned memory; return False if that cannot be done.

    `part` is on "meta": its offset says where the bytes are.
    """
    incoming = Incoming(target.nbytes)
    is_row = part.is_contiguous() and target.is_contiguous()
    if target.nbytes < _SMALL_BYTES or not is_row or not incoming.takes(target.device):
        return False
    reader = stored._reader
    incoming.add(
        Wanted(
            stored._begin + int(part.storage_offset()) * part.element_size(),
            memory_on_device(target),
            lambda: changed(target),
            reader.crc32_of_all(record) if target.nbytes == record.n_bytes else None,
            lambda: reader.damaged(record),
        )
    )
    incoming.bring(reader.read_file)
    return True


class _Alone(frozenset[tuple[str, int]]):
    """Positions in data files that only one rank reads."""


class Reader(filesystem.FileSystemReader):
    """A reader of checkpoints for dcp.load() that verifies what it reads.

    It replaces FileSystemReader and reads the same files. It reads only what this rank
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
        self._alarms: dict[str, frozenset[str]] = getattr(metadata, families.ALARMS, {})
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
        positions = [{self._position(item) for item in plan.items} for plan in plans]
        readers = collections.Counter(itertools.chain.from_iterable(positions))
        alone = [_Alone(one for one in its if readers[one] == 1) for its in positions]
        return [
            dataclasses.replace(plan, storage_data=its)
            for plan, its in zip(plans, alone, strict=True)
        ]

    def _position(self, item: ReadItem) -> tuple[str, int]:
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
        items = sorted(plan.items, key=self._position)
        with Items(os.fspath(self.path)) as loaded:
            for position, requests in itertools.groupby(items, key=self._position):
                left += self._read(list(requests), planner, loaded, is_alone=position in alone)
            loaded.remember(self._alarms)
        if left:
            return super().read_data(LoadPlan(left), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, requests: list[ReadItem], planner: LoadPlanner, loaded: Items, *, is_alone: bool
    ) -> list[ReadItem]:
        """Read all that is wanted of one item in a file; return the requests left for DCP."""
        index = requests[0].storage_index
        info = self.storage_data[index]
        if getattr(info, "transform_descriptors", None) or not info.length:
            return requests
        path = os.path.join(self.path, info.relative_path)  # noqa: PTH118
        part = (info.offset, info.length)
        try:
            archive = open_if_ours(path, part=part, fresh=False, shared=False if is_alone else None)
            if archive is None:
                return requests
            with archive:
                left = self._read_item(archive, requests, planner)
                loaded.add_loaded(archive, description.name_of(index), self._alarms)
                return left
        except DamagedError as error:
            raise holding(error, f"'{index.fqn}'") from None

    def _read_item(
        self, reader: ZipReader, requests: list[ReadItem], planner: LoadPlanner
    ) -> list[ReadItem]:
        left = []
        stored: StoredTensor | None = None
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
            _read_part(stored, tuple(request.storage_offsets), target)
            planner.commit_tensor(request, target)
        return left


def _stored(reader: ZipReader) -> StoredTensor | None:
    """Return the tensor in an archive; None if it is quantized, of a subclass, or complex."""
    contents = contents_of(reader)
    tensors = contents.tensors
    if len(tensors) != 1 or tensors[0].name or not hasattr(torch, tensors[0].dtype):
        return None
    record = next((one for one in contents.records if one.name == tensors[0].record), None)
    if record is None or not tensors[0].is_plain:
        return None
    stored = in_record(reader, tensors[0], record)
    if isinstance(stored, str) or stored.dtype.is_complex:
        return None
    return stored


# ---- The newest checkpoint -----------------------------------------------------------------------
#
# Load the newest intact checkpoint of a directory on all ranks: ioshape.dcp.load_latest().


def _reason(error: dcp.CheckpointException) -> StorageError | None:
    """Return the reason to try another checkpoint; None if that would hide another failure."""
    failures = [wrapped[0] for wrapped in error.failures.values()]
    storage = [one for one in failures if isinstance(one, StorageError) and not is_our_fault(one)]
    return storage[0] if len(storage) == len(failures) else None


#: a path, and the reason not to try it; None if it should be tried
Candidate = tuple[str, StorageError | None]


def _first_intact(candidates: list[Candidate], directory: str, load: Callable[[str], None]) -> str:
    """Load the first candidate that can be loaded, and return its path.

    A warning names the ones passed over. All ranks decide alike, because DCP sends the failures of
    all ranks to each of them.
    """
    passed_over: list[PassedOver] = []
    for path, incomplete in candidates:
        if incomplete is not None:
            if is_our_fault(incomplete):
                raise incomplete
            passed_over.append(PassedOver(path, incomplete))
            continue
        try:
            load(path)
        except dcp.CheckpointException as error:
            reason = _reason(error)
            if reason is None:
                raise
            passed_over.append(PassedOver(path, reason))
        else:
            warn_passed_over(path, passed_over)
            return path
    if passed_over:
        raise no_usable(directory, passed_over)
    refuse_others(directory, "dcp")
    raise failure(
        -errno.ENOENT,
        f'cannot load "{directory}": there is no checkpoint in it yet',
        directory,
        "load",
        remedy="give a directory of checkpoints whose names end in a number, such as step-1000",
    )


def _candidates(directory: str, group: Any, *, healthy: bool, no_dist: bool) -> list[Candidate]:
    """Return the candidates as rank 0 sees them, because a checkpoint may appear meanwhile."""

    def look() -> list[Candidate]:
        found = families.newest_first(directory, healthy=healthy)
        return [(path, one if isinstance(one, StorageError) else None) for path, one in found]

    if no_dist or not dist.is_available() or not dist.is_initialized():
        return look()
    source = dist.get_global_rank(group, 0) if group is not None else 0
    told: list[Any] = [None]
    if dist.get_rank() == source:
        try:
            told = [look()]
        except OSError as error:
            told = [error]
    dist.broadcast_object_list(told, src=source, group=group)
    if isinstance(told[0], OSError):
        raise told[0]
    return list(told[0])


def load_latest(
    state_dict: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    healthy: bool = False,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> str:
    """Load the newest intact checkpoint in a directory into a state dict.

    All ranks call this function, as they call dcp.load(), and load the same checkpoint. All of them
    pass over damaged checkpoints, and a FallbackWarning names these and says why.

    Args:
        state_dict: The state dict to fill, as in dcp.load().
        directory: A directory that contains checkpoints whose names end in a number, such as
            step-1000. The newest is the one that was saved last, whatever its number.
        healthy: True also passes over checkpoints whose content looked wrong when they were saved
            (setting "examine"). Checkpoints that were not examined count as healthy.
        planner: As in dcp.load().
        process_group: As in dcp.load().
        no_dist: As in dcp.load().

    Returns:
        The path of the loaded checkpoint.

    Raises:
        FileNotFoundError: There is no checkpoint, so this is the first start of the job.
        NoUsableCheckpointError: There are checkpoints, but none can be used.
        CheckpointException: Loading failed for another reason.
    """
    where = os.fspath(directory)

    def load(path: str) -> None:
        dcp.load(
            state_dict,
            storage_reader=Reader(path),
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )

    candidates = _candidates(where, process_group, healthy=healthy, no_dist=no_dist)
    return _first_intact(candidates, where, load)
