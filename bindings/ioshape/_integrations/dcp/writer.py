# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints of torch.distributed.checkpoint: Writer replaces DCP's FileSystemWriter.

Each rank writes its items one after the other to a file of its own, or to its range of a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ioshape import _torch as original
from ioshape._core.config import is_durable, value_of
from ioshape._core.job import node_name
from ioshape._core.log import logger
from ioshape._group import dcp_contents as families
from ioshape._integrations.dcp.attempt import Attempt
from ioshape._integrations.dcp.files import Files
from ioshape._integrations.dcp.metadata import name_of
from ioshape._integrations.dcp.staging import copy_later, copy_of
from ioshape._save import lazy as lazily
from ioshape._save import pickling
from ioshape._save.atomic import PART_UNIT, Part
from ioshape._save.items import Items, Verdict, judge_together
from ioshape._save.pickling import records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from ioshape._core.report import Report
    from ioshape._save.atomic import AtomicFile


_log = logger()


class Assignment(NamedTuple):
    """The location of a rank's files."""

    #: the hidden directory, relative to the checkpoint: ranks may see that under different paths
    folder: str
    #: the rank's range of a common file; None if it writes a file of its own
    share: Share | None


# Assignments that rank 0 has sent to this process for saves in progress, by the checkpoint's path.
_told: dict[str, Assignment] = {}


class _Prefix(filesystem._StoragePrefix):
    """The storage data that rank 0 sends to a rank with its plan, including the Assignment of its
    files.

    The Assignment is stored on arrival. A planner that caches plans would otherwise use the storage
    data of the last save, with an outdated Assignment.
    """

    def __init__(self, prefix: str, path: str, assignment: Assignment) -> None:
        super().__init__(prefix)
        self.path = path
        self.assignment = assignment

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.prefix, self.path, self.assignment)


def _arrive(prefix: str, path: str, assignment: Assignment) -> _Prefix:
    _told[path] = assignment
    return _Prefix(prefix, path, assignment)


def _arrived(path: str, planned: Any) -> Assignment:
    """Return the Assignment that rank 0 sent to this rank, with the folder's absolute path."""
    real_path = os.path.realpath(path)
    assignment = _told.pop(real_path, None) or getattr(planned, "assignment", None)
    if assignment is None:
        raise RuntimeError(f"rank 0 did not report the folder for the files of {path}")
    folder = os.path.normpath(os.path.join(real_path, assignment.folder))  # noqa: PTH118
    return Assignment(folder, assignment.share)


class _Results(list[WriteResult]):
    """The results of a rank for DCP, which brings them to rank 0, and the verdict on its items."""

    verdict: Verdict


class Writer(filesystem.FileSystemWriter):
    """A writer of checkpoints for dcp.save() and dcp.async_save(): durable and atomic.

    It replaces FileSystemWriter, with its arguments and its file format. All files of a
    checkpoint are on stable storage before the checkpoint appears at its path. If a rank dies
    meanwhile, the old checkpoint stays as it was. While a checkpoint is replaced, the path always
    has either the old or the new one. Each rank writes one file. If the setting `mode` is "node" or
    "rank0", the ranks of a node, or all ranks, write one file together.

    Args:
        path: The directory of the checkpoint, which need not exist.
        args: As for FileSystemWriter.
        keep_last: How many checkpoints of the family stay after each save, this one included,
            newest first. The family is in the same directory, and its names differ only in the
            number at the end. None: all.
        optimizer: An optimizer, or a list of them, with which dcp.async_save() hardly waits. What a
            torch.optim.Optimizer changes is copied in the background until its next step. That step
            waits for the rest, as in ioshape.save_async(). GPU memory is copied before the call
            returns. The call returns an AsyncSaveResponse, whose upload_completion is the future of
            the save.
        lazy: True does what `optimizer` does, for a training loop without such an optimizer. No
            storage of 1 MiB or more may change until you call ioshape.before_step().
        kwargs: As for FileSystemWriter. With sync_files=False a save does not wait for stable
            storage.

    Raises:
        ValueError: `keep_last` is less than 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        keep_last: int | None = None,
        optimizer: Any = None,
        lazy: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, *args, **kwargs)
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; give at least 1")
        if optimizer is not None:
            lazily.waiters_of(optimizer)  # raises if the optimizer does not report its steps
        self._keep_last = keep_last
        self._optimizer = optimizer
        self._is_lazy = lazy or optimizer is not None
        self.fs: Files = Files(durable=self.sync_files and is_durable(None))
        # With sync_files DCP would sync the whole machine, because these files have no descriptor.
        self.sync_files = False
        self._attempt: Attempt | None = None
        self._share: Share | None = None  # the share of the save in progress
        self._copy_failures: list[Exception] = []  # failures of the copy that is saved next

    @property
    def reports(self) -> list[Report]:
        """The Reports of the files that this process wrote for the last checkpoint."""
        return self.fs.reports

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attempt": None, "_optimizer": None}

    def stage(self, state_dict: Any) -> Any:
        """Copy the state dict of dcp.async_save(), to memory that is kept for the next save.

        Args:
            state_dict: The state dict.

        Returns:
            The copy, or a future of it with `optimizer` or `lazy`.
        """
        if self.cache_staged_state_dict:
            return super().stage(state_dict)
        self._copy_failures = []
        if self._is_lazy:
            tell_failure = self._copy_failures.append
            own = copy_later(state_dict, self._optimizer, os.fspath(self.path), tell_failure)
        else:
            own = copy_of(state_dict)
        return super().stage(state_dict) if own is None else own

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a new save. DCP calls this.

        Args:
            checkpoint_id: The path of the checkpoint, if it changes.
        """
        super().reset(checkpoint_id)
        self._give_up()

    def _give_up(self) -> None:
        """Remove what a failed save has left."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell rank 0 with which ranks this one would share a file.

        Args:
            plan: This rank's plan.

        Returns:
            The plan with that information.

        Raises:
            StorageError: A tensor changed before it was copied.
        """
        if self._copy_failures:  # DCP reports to all ranks what a rank raises here
            raise self._copy_failures.pop()
        plan = super().prepare_local_plan(plan)
        return dataclasses.replace(plan, storage_data=own_node()) if self._may_share() else plan

    def _may_share(self) -> bool:
        """Return whether each rank writes one file, whose size can be estimated before."""
        return self.use_collectives and self._is_one_file() and self._writes_items()

    def _is_one_file(self) -> bool:
        return self.single_file_per_rank and self.thread_count == 1

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the checkpoint and decide where each rank writes its files.

        Rank 0 does this for all ranks. Without collectives, each rank does it for itself.

        Args:
            plans: The plans of the ranks.

        Returns:
            The plans with the folder of each rank's files.

        Raises:
            StorageError: The directory could not be created.
        """
        self._give_up()
        rank = None if self.use_collectives else self.rank
        attempt = Attempt(str(self.path), durable=self.fs.durable, rank=rank)
        self._attempt = attempt
        shares = shares_of(plans) if self._may_share() else [None] * len(plans)
        assignments = [Assignment(attempt.relative_folder, share) for share in shares]
        _told[attempt.path] = next(iter(assignments), Assignment(attempt.relative_folder, None))

        def told(number: int, plan: SavePlan) -> SavePlan:
            prefix = f"__{number if rank is None else rank}_"
            data = _Prefix(prefix, attempt.path, assignments[number])
            return dataclasses.replace(plan, storage_data=data)

        return [told(number, plan) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files.

        Args:
            plan: This rank's plan.
            planner: The planner that provides the data.

        Returns:
            A completed future with the positions of the items.

        Raises:
            StorageError: A file could not be written.
        """
        assignment = _arrived(str(self.path), plan.storage_data)
        self.fs.folder = assignment.folder
        self._share = assignment.share if self._may_share() else None
        self.fs.reports = []
        self.fs.failure = None
        self.fs.expected_bytes = sum(tensor_bytes(plan)) if self._is_one_file() else 0
        try:
            with Items(str(self.path)) as items:
                self.fs.items = items
                written = super().write_data(plan, planner)
                if self.fs.failure is not None:
                    raise self.fs.failure
                verdict = items.judge()
        except BaseException:
            self._give_up()  # DCP does not report failures of other ranks here
            raise
        finally:
            self.fs.items = None
        self._report(verdict)
        results = _Results(written.value())
        results.verdict = verdict
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _report(self, verdict: Verdict) -> None:
        """Set the alarms in the reports of this process."""
        self.fs.reports[:] = [
            dataclasses.replace(one, alarms=tuple(verdict.alarms), alarm=verdict.alarm)
            for one in self.fs.reports
        ]

    def _write_data(
        self, planner: SavePlanner, file_queue: queue.Queue[tuple[Any, str, list[WriteItem]]]
    ) -> Future[list[WriteResult]]:
        """Write each queued file: path, name, items. DCP calls this."""
        if not self._writes_items():
            return super()._write_data(planner, file_queue)
        files = [file_queue.get_nowait() for _ in range(file_queue.qsize())]

        def write(path: Any, name: str, items: list[WriteItem]) -> list[WriteResult]:
            if self._share is not None:
                return self._write_share(self._share, name, items, planner)
            if not items and own_node() is not None:
                return []  # an empty file would defeat the aim of fewer files
            with self.fs.create(path) as file:
                return write_items(lambda _bytes: (file, name), items, planner)

        done: Future[list[WriteResult]] = Future()
        if self.thread_count == 1:
            written = [write(*file) for file in files]
        else:
            with ThreadPoolExecutor(self.thread_count) as threads:
                written = list(threads.map(write, *zip(*files, strict=True)))
        done.set_result([result for of_file in written for result in of_file])
        return done

    def _write_share(
        self, share: Share, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write items to a rank's range of a common file.

        Items that do not fit go to a file of the rank's own, whose name follows `name`.
        """
        folder = str(self.path)
        own_name = f"{name.rpartition('_')[0]}_1.distcp"
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self.fs.create(f"{folder}/{share.file}", share.part))
            self.fs.expected_bytes = 0
            end = share.part.offset + share.part.n_bytes
            own: list[AtomicFile] = []

            def file_for(n_bytes: int) -> tuple[AtomicFile, str]:
                if file.tell() + n_bytes <= end:
                    return file, share.file
                if not own:
                    own.append(stack.enter_context(self.fs.create(f"{folder}/{own_name}")))
                return own[0], own_name

            return write_items(file_for, items, planner)

    def _writes_items(self) -> bool:
        """Return whether ioshape writes the files item by item, and not DCP's own code."""
        # Older versions of torch have only this format.
        format_ = getattr(self, "serialization_format", None)
        is_of_torch_save = format_ is None or format_.value == "torch_save"
        return is_of_torch_save and not self.transforms.extensions

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the checkpoint in place, and remove older ones by `keep_last`.

        Args:
            metadata: The description of the checkpoint, which this completes.
            results: The positions of the items of each rank.

        Raises:
            StorageError: A file is missing, or the checkpoint could not be put in place.
        """
        if self._attempt is None:
            raise RuntimeError("finish() without a plan: DCP calls prepare_global_plan() first")
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        attempt, self._attempt = self._attempt, None
        with contextlib.closing(attempt):
            verdicts = [one.verdict for one in results if isinstance(one, _Results)]
            verdict = judge_together(attempt.path, verdicts)
            self._report(verdict)
            if verdict.alarms:
                setattr(metadata, families.ALARMS, verdict.alarms)
            attempt.commit(metadata)
        prefix = families.prefix_of(attempt.path)
        if self._keep_last is not None and prefix is not None:
            self._remove_older(os.path.dirname(attempt.path), prefix, self._keep_last)  # noqa: PTH120

    def _remove_older(self, directory: str, prefix: str, keep_last: int) -> None:
        try:
            families.remove(directory, keep_last=keep_last, prefix=prefix)
        except OSError as error:  # the save itself has succeeded
            _log.warning("older checkpoints in %s were not removed: %s", directory, error)


# ---- Items ---------------------------------------------------------------------------------------
#
# Write the items of a save plan, one after the other, to data files.
#
# Each tensor is an archive of its own in the file, as in DCP's own code, which uses torch.save.
# These archives are those of ioshape.save: they come straight from the tensors' memory, also from
# a GPU's, and have a checksum for each MiB.

# the protocol of torch.save
_PROTOCOL = 2

# The state of an optimizer in a state dict: "optimizer.state.0.exp_avg"
_OF_OPTIMIZER = re.compile(r"\boptim\w*\.state\.")


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage holds nothing else."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.cpu().clone()  # needs less GPU memory than a clone there


def _writer_of(item: WriteItem, data: Any) -> tuple[int, Callable[[AtomicFile], object]]:
    """Return the largest size of an item in bytes, and a function that writes it to a file."""
    if item.type == WriteItemType.BYTE_IO:
        content = data.getbuffer()
        return content.nbytes, lambda file: file.write(content)
    tensor = _alone(data.detach())
    try:
        pickled = pickling.collect(tensor, pickle, _PROTOCOL)
    except pickling.Unsupported:
        return sys.maxsize, lambda file: original.save(tensor, file)
    if _OF_OPTIMIZER.search(item.index.fqn):
        pickled.optimizer_storages = frozenset({tensor.untyped_storage().data_ptr()})
    name = name_of(item.index)
    return most_bytes(pickled.n_bytes), lambda file: file.write_records(name, records_of(pickled))


def write_items(
    file_for: Callable[[int], tuple[AtomicFile, str]], items: list[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    """Write all items in DCP's order: those that are not tensors come first.

    Args:
        file_for: Returns the file that takes an item of at most so many bytes, and its name.
        items: The items.
        planner: The planner, which knows the data of the items.

    Returns:
        The results for DCP, with the position of each item.
    """
    written = []
    for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
        most, write = _writer_of(item, planner.resolve_data(item))
        file, name = file_for(most)
        begin = file.tell()
        write(file)
        n_bytes = file.tell() - begin
        info = filesystem._StorageInfo(name, begin, n_bytes)
        written.append(WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=info))
    return written


# ---- Files that several ranks write --------------------------------------------------------------
#
# Compute which files several ranks write together, and the range of each rank.

# Bytes of an item in a file besides its data, at most: an archive has a directory, and a checksum
# for each MiB. The size of an item that is not a tensor is unknown before it is written.
_ITEM_BYTES = 8 << 10
# Bytes of a tensor's pickle beside its data: a few hundred, unless the tensor has attributes.
_PICKLE_BYTES = 1 << 10


class Node(NamedTuple):
    """A key that a rank sends to rank 0 with its plan. Ranks with equal keys write one file."""

    name: str


class Share(NamedTuple):
    """A rank's range of a file that several ranks write."""

    #: name of the file
    file: str
    part: Part


def own_node() -> Node | None:
    """Return this rank's key by the setting `mode`; None if it writes its own file, as with DCP."""
    mode = value_of("mode")
    if mode == "node":
        return Node(node_name())
    return Node("") if mode == "rank0" else None


def most_bytes(n_bytes: int) -> int:
    """Return the largest size in a file of an item with this many bytes of data."""
    return n_bytes + (n_bytes >> 16) + _ITEM_BYTES


def planned_bytes(plan: SavePlan) -> int:
    """Return the bytes that a rank asks for, which suffice for its tensors and their pickles."""
    return sum(most_bytes(n_bytes + _PICKLE_BYTES) for n_bytes in tensor_bytes(plan))


def tensor_bytes(plan: SavePlan) -> list[int]:
    """Return the bytes of each item of a plan; 0 for items that are not tensors."""
    tensors = [item.tensor_data for item in plan.items]
    return [
        one.chunk.sizes.numel() * one.properties.dtype.itemsize if one is not None else 0
        for one in tensors
    ]


def _known_plans(n_ranks: int) -> list[SavePlan]:
    """Return the plans of all ranks that DCP's planner has cached, or none.

    If several kinds of planners have cached plans, it is not known which ones fit.
    """
    kept = list(getattr(SavePlanner, "_cached_global_plan", {}).values())
    return kept[0] if len(kept) == 1 and len(kept[0]) == n_ranks else []


def shares_of(plans: Iterable[SavePlan]) -> list[Share | None]:
    """Return each rank's share of a file; None for ranks that write a file of their own."""
    given = list(plans)
    # If a plan has not changed, DCP does not send it again.
    known = _known_plans(len(given)) or given
    told = [
        plan if getattr(plan, "usable", True) else old
        for plan, old in zip(given, known, strict=True)
    ]
    nodes = [one.storage_data if isinstance(one.storage_data, Node) else None for one in told]
    return shares(list(zip(nodes, map(planned_bytes, told), strict=True)))


def shares(asked: list[tuple[Node | None, int]]) -> list[Share | None]:
    """Return each rank's share, from its node and the bytes that it asks for."""
    nodes: dict[Node, list[int]] = {}
    for rank, (node, n_bytes) in enumerate(asked):
        if node is not None and n_bytes:
            nodes.setdefault(node, []).append(rank)
    found: list[Share | None] = [None] * len(asked)
    for ranks in nodes.values():
        lengths = [-(-asked[rank][1] // PART_UNIT) * PART_UNIT for rank in ranks]
        offset = 0
        for rank, length in zip(ranks, lengths, strict=True):
            part = Part(offset, length, sum(lengths))
            found[rank] = Share(f"__{ranks[0]}_0.distcp", part)
            offset += length
    return found
