# SPDX-License-Identifier: Apache-2.0
"""FileSystemWriter, with files of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem

from ioshape._dcp.attempt import Attempt, arrived
from ioshape._dcp.names import CHECKSUMS
from ioshape._errors import failure
from ioshape._files.atomic import AtomicFile, How
from ioshape._settings.config import is_durable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from ioshape._files.checksums import Checksums
    from ioshape._save.report import Report

# What rank 0 has told this process about checkpoints on their way: path, relative folder.
_told: dict[str, str] = {}


class _Prefix(filesystem._StoragePrefix):
    """What rank 0 tells a rank with its plan: also where the files go.

    Noted as it arrives: planners that keep their plans take theirs from the last save instead, with
    what it was told then.
    """

    def __init__(self, prefix: str, path: str, folder: str) -> None:
        super().__init__(prefix)
        self.path = path
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.prefix, self.path, self.folder)


def _arrive(prefix: str, path: str, folder: str) -> _Prefix:
    _told[path] = folder
    return _Prefix(prefix, path, folder)


def _tensor_bytes(plan: SavePlan) -> int:
    parts = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in parts)


class _Files(filesystem.FileSystem):
    """Where DCP's own code gets the files that it writes."""

    def __init__(self, *, durable: bool) -> None:
        super().__init__()
        self.durable = durable
        self.folder = ""  # of the attempt under way
        self.expected_bytes = 0  # of the next file; 0 if that is not known
        self.reports: list[Report] = []
        self.checksums: dict[str, Checksums] = {}  # by the names of files
        self.failure: BaseException | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file that is there when it is complete."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        target = os.path.join(self.folder, os.path.basename(path))  # noqa: PTH118, PTH119
        how = How(
            self.durable,
            replace=True,
            expected_bytes=self.expected_bytes,
            known_as=os.fspath(path),
            checksums="told",
        )
        try:
            with AtomicFile(target, how) as file:
                yield file
            if file.report is not None:
                self._keep(file.report)
            if file.checksums is not None:
                self.checksums[os.path.basename(path)] = file.checksums  # noqa: PTH119
        except BaseException as error:
            self.failure = error  # DCP's threads lose theirs
            raise

    def _keep(self, report: Report) -> None:
        self.reports.append(report)
        if report.skipped:
            # One file of many: the checkpoint cannot be without it.
            raise failure(
                -errno.ENOSPC,
                f'cannot save "{report.path}": {report.fallbacks[-1]}',
                report.path,
                "save",
            )

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: a directory is there when what is in it is complete."""


class Writer(filesystem.FileSystemWriter):
    """Saves checkpoints of torch.distributed.checkpoint: durable, and as a whole or not at all.

    For dcp.save() and dcp.async_save(), as FileSystemWriter, with its arguments and its files. All
    files of a checkpoint are on stable storage before it appears under its path. If a rank dies
    meanwhile, what was there before stays as it was; if a checkpoint is replaced, one of the two is
    there at any moment.

    Args:
        path: of the checkpoint: a directory, which need not be there.
        args: as for FileSystemWriter.
        kwargs: as for FileSystemWriter. With sync_files=False a save does not wait for stable
            storage.
    """

    def __init__(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.fs = self._files = _Files(durable=self.sync_files and is_durable(None))
        # DCP would sync the whole machine: its files have no descriptor that it could sync.
        self.sync_files = False
        self._attempt: Attempt | None = None

    @property
    def reports(self) -> list[Report]:
        """What was written by this process for the last checkpoint: a Report for each file."""
        return self._files.reports

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_attempt": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As DCP calls it before a save."""
        super().reset(checkpoint_id)
        self._give_up()

    def _give_up(self) -> None:
        """Removes what a save that failed has left."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the checkpoint: rank 0, or each for itself if there are no collectives."""
        self._give_up()
        rank = None if self.use_collectives else self.rank
        attempt = Attempt(str(self.path), durable=self._files.durable, rank=rank)
        self._attempt = attempt
        folder = attempt.relative_folder
        _told[attempt.path] = folder

        def told(number: int, plan: SavePlan) -> SavePlan:
            prefix = f"__{number if rank is None else rank}_"
            return dataclasses.replace(plan, storage_data=_Prefix(prefix, attempt.path, folder))

        return [told(number, plan) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files."""
        self._files.folder = arrived(_told, str(self.path), plan.storage_data)
        self._files.reports = []
        self._files.failure = None
        self._files.checksums = {}
        is_one_file = self.single_file_per_rank and self.thread_count == 1
        self._files.expected_bytes = _tensor_bytes(plan) if is_one_file else 0
        try:
            written = super().write_data(plan, planner)
            if self._files.failure is not None:
                raise self._files.failure
        except BaseException:
            self._give_up()  # DCP does not say when a save has failed elsewhere
            raise
        for result in written.value():
            told = self._files.checksums.pop(result.storage_data.relative_path, None)
            if told is not None:
                # With an item of the file, any one, it gets to rank 0 and into .metadata. Stock
                # readers do not look at it.
                setattr(result.storage_data, CHECKSUMS, tuple(told[:3]))
        return written

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
