# SPDX-License-Identifier: Apache-2.0
"""FileSystemWriter, with files of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem
from torch.futures import Future

from ioshape._core.config import is_durable
from ioshape._core.log import logger
from ioshape._group import dcp_series as series
from ioshape._integrations.dcp.attempt import Attempt, Place, arrived
from ioshape._integrations.dcp.files import Files
from ioshape._integrations.dcp.items import write_items
from ioshape._integrations.dcp.shares import own_node, shares_of, tensor_bytes
from ioshape._integrations.dcp.staging import copy_later, copy_of
from ioshape._save import lazy as lazily

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from ioshape._core.report import Report
    from ioshape._integrations.dcp.shares import Share
    from ioshape._save.atomic import AtomicFile

_log = logger()

# What rank 0 has told this process about checkpoints on their way, by their paths.
_told: dict[str, Place] = {}


class _Prefix(filesystem._StoragePrefix):
    """What rank 0 tells a rank with its plan: also where the files go.

    Noted as it arrives: planners that keep their plans take theirs from the last save instead, with
    what it was told then.
    """

    def __init__(self, prefix: str, path: str, place: Place) -> None:
        super().__init__(prefix)
        self.path = path
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.prefix, self.path, self.place)


def _arrive(prefix: str, path: str, place: Place) -> _Prefix:
    _told[path] = place
    return _Prefix(prefix, path, place)


class Writer(filesystem.FileSystemWriter):
    """Saves checkpoints of torch.distributed.checkpoint: durable, and as a whole or not at all.

    For dcp.save() and dcp.async_save(), as FileSystemWriter, with its arguments and its files. All
    files of a checkpoint are on stable storage before it appears under its path. If a rank dies
    meanwhile, what was there before stays as it was; if a checkpoint is replaced, one of the two is
    there at any moment. Each rank writes a file; with the setting `mode` at "node" or "rank0" those
    of a node, or all, write one together.

    Args:
        path: of the checkpoint: a directory, which need not be there.
        args: as for FileSystemWriter.
        keep_last: after each save, of the checkpoints beside this one with the same name but for
            the number at its end, only so many of the newest stay, this one included. None: all.
        optimizer: dcp.async_save() hardly waits: what this torch.optim.Optimizer changes, or those
            of a list, is copied until its next step, which waits for what is left, as in
            ioshape.save_async(). What lies in a GPU is copied before the call returns. The call
            gives an AsyncSaveResponse, whose upload_completion is the future of the save.
        lazy: the same for a loop of your own, without such an optimizer: no storage from 1 MiB on
            changes until you call ioshape.before_step().
        kwargs: as for FileSystemWriter. With sync_files=False a save does not wait for stable
            storage.
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
            raise ValueError(f"keep_last is {keep_last}; at least the newest checkpoint stays")
        if optimizer is not None:
            lazily.waiters_of(optimizer)  # raises where nothing tells of steps
        self._keep_last = keep_last
        self._optimizer = optimizer
        self._is_lazy = lazy or optimizer is not None
        self._files = Files(durable=self.sync_files and is_durable(None))
        self.fs: Files = self._files
        # DCP would sync the whole machine: its files have no descriptor that it could sync.
        self.sync_files = False
        self._attempt: Attempt | None = None
        self._share: Share | None = None  # of the save under way
        self._copy_failures: list[Exception] = []  # of what is to be saved next

    @property
    def reports(self) -> list[Report]:
        """What was written by this process for the last checkpoint: a Report for each file."""
        return self._files.reports

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attempt": None, "_optimizer": None}

    def stage(self, state_dict: Any) -> Any:
        """Copies what dcp.async_save() is given, to memory that is kept for the next save."""
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
        """As DCP calls it before a save."""
        super().reset(checkpoint_id)
        self._give_up()

    def _give_up(self) -> None:
        """Removes what a save that failed has left."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Says which ranks this one would share a file with."""
        if self._copy_failures:  # DCP tells all ranks what one raises here
            raise self._copy_failures.pop()
        plan = super().prepare_local_plan(plan)
        return dataclasses.replace(plan, storage_data=own_node()) if self._may_share() else plan

    def _may_share(self) -> bool:
        """Whether a rank has one file, of whose length something is known before."""
        is_one_file = self.single_file_per_rank and self.thread_count == 1
        return self.use_collectives and is_one_file and self._writes_items()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the checkpoint: rank 0, or each for itself if there are no collectives."""
        self._give_up()
        rank = None if self.use_collectives else self.rank
        attempt = Attempt(str(self.path), durable=self._files.durable, rank=rank)
        self._attempt = attempt
        shares = shares_of(plans) if self._may_share() else [None] * len(plans)
        places = [Place(attempt.relative_folder, share) for share in shares]
        _told[attempt.path] = next(iter(places), Place(attempt.relative_folder, None))

        def told(number: int, plan: SavePlan) -> SavePlan:
            prefix = f"__{number if rank is None else rank}_"
            data = _Prefix(prefix, attempt.path, places[number])
            return dataclasses.replace(plan, storage_data=data)

        return [told(number, plan) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files."""
        place = arrived(_told, str(self.path), plan.storage_data)
        self._files.folder = place.folder
        self._share = place.share if self._may_share() else None
        self._files.reports = []
        self._files.failure = None
        is_one_file = self.single_file_per_rank and self.thread_count == 1
        self._files.expected_bytes = sum(tensor_bytes(plan)) if is_one_file else 0
        try:
            written = super().write_data(plan, planner)
            if self._files.failure is not None:
                raise self._files.failure
        except BaseException:
            self._give_up()  # DCP does not say when a save has failed elsewhere
            raise
        return written

    def _write_data(
        self, planner: SavePlanner, file_queue: queue.Queue[tuple[Any, str, list[WriteItem]]]
    ) -> Future[list[WriteResult]]:
        """As DCP calls it with what is to be written to each file: path, name, items."""
        if not self._writes_items():
            return super()._write_data(planner, file_queue)
        files = [file_queue.get_nowait() for _ in range(file_queue.qsize())]

        def write(path: Any, name: str, items: list[WriteItem]) -> list[WriteResult]:
            if self._share is not None:
                return self._write_share(self._share, name, items, planner)
            if not items and own_node() is not None:
                return []  # it is not there for fewer files that an empty one is made
            with self._files.create(path) as file:
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
        """To a part of a file; what has no room there to one of this rank's own, after `name`."""
        folder = str(self.path)
        own_name = f"{name.rpartition('_')[0]}_1.distcp"
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._files.create(f"{folder}/{share.file}", share.part))
            self._files.expected_bytes = 0
            end = share.part.offset + share.part.n_bytes
            own: list[AtomicFile] = []

            def file_for(n_bytes: int) -> tuple[AtomicFile, str]:
                if file.tell() + n_bytes <= end:
                    return file, share.file
                if not own:
                    own.append(stack.enter_context(self._files.create(f"{folder}/{own_name}")))
                return own[0], own_name

            return write_items(file_for, items, planner)

    def _writes_items(self) -> bool:
        """Whether files are written item by item, or by DCP's own code."""
        # Older versions of torch know no other format.
        format_ = getattr(self, "serialization_format", None)
        is_of_torch_save = format_ is None or format_.value == "torch_save"
        return is_of_torch_save and not self.transforms.extensions

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Puts the checkpoint in place."""
        if self._attempt is None:
            raise RuntimeError("finish() without a plan: DCP calls prepare_global_plan() before")
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        attempt, self._attempt = self._attempt, None
        attempt.commit(metadata)
        prefix = series.prefix_of(attempt.path)
        if self._keep_last is not None and prefix is not None:
            self._remove_older(os.path.dirname(attempt.path), prefix, self._keep_last)  # noqa: PTH120

    def _remove_older(self, directory: str, prefix: str, keep_last: int) -> None:
        try:
            series.remove(directory, keep_last=keep_last, prefix=prefix)
        except OSError as error:  # the save itself is done
            _log.warning("older checkpoints in %s stay: %s", directory, error)
