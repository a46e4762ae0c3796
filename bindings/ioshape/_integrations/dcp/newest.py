# SPDX-License-Identifier: Apache-2.0
"""load_latest(): the newest intact checkpoint of a series, by all ranks together."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner, state_dict_loader

from ioshape._core.errors import (
    PassedOver,
    StorageError,
    failure,
    is_our_fault,
    no_usable,
    warn_passed_over,
)
from ioshape._group import dcp_series as series
from ioshape._group.kinds import refuse_others
from ioshape._integrations.dcp.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import LoadPlanner


def _reason(error: dcp.CheckpointException) -> StorageError | None:
    """Why another checkpoint may be tried; None if that would hide something else."""
    failures = [wrapped[0] for wrapped in error.failures.values()]
    storage = [one for one in failures if isinstance(one, StorageError) and not is_our_fault(one)]
    return storage[0] if len(storage) == len(failures) else None


#: a path, and why it is not to be tried; None if it is
Candidate = tuple[str, StorageError | None]


def _first_intact(
    candidates: list[Candidate], directory: str, load: Callable[[str], Any]
) -> tuple[str, Any]:
    """The first that can be loaded, and what load() returned; the others are named in a warning.

    All ranks come to the same: DCP tells each of them how all have failed.
    """
    passed_over: list[PassedOver] = []
    for path, incomplete in candidates:
        if incomplete is not None:
            if is_our_fault(incomplete):
                raise incomplete
            passed_over.append(PassedOver(path, incomplete))
            continue
        try:
            loaded = load(path)
        except dcp.CheckpointException as error:
            reason = _reason(error)
            if reason is None:
                raise
            passed_over.append(PassedOver(path, reason))
        else:
            warn_passed_over(path, passed_over)
            return path, loaded
    if passed_over:
        raise no_usable(directory, passed_over)
    refuse_others(directory, "dcp")
    raise failure(
        -errno.ENOENT,
        f'cannot load "{directory}": there is no checkpoint in it yet',
        directory,
        "load",
        remedy="give a directory of checkpoints whose names end in a number, as step-1000",
    )


def _candidates(directory: str, group: Any, *, no_dist: bool) -> list[Candidate]:
    """As rank 0 sees them: a checkpoint may come into place meanwhile."""

    def look() -> list[Candidate]:
        found = series.newest_first(directory)
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
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> str:
    """Loads the newest checkpoint of a directory that is intact into a state dict.

    All ranks call it, as dcp.load(), and load the same checkpoint. One that is damaged is passed
    over, by all of them, and a FallbackWarning says which, and why.

    Args:
        state_dict: as for dcp.load().
        directory: with checkpoints in it whose names end in a number, as step-1000. The newest is
            what was saved last, whatever its number.
        planner: as for dcp.load().
        process_group: as for dcp.load().
        no_dist: as for dcp.load().

    Returns:
        The path of the checkpoint.

    Raises:
        FileNotFoundError: there is none: the job starts for the first time.
        NoUsableCheckpointError: there are some, and none of them can be used.
        CheckpointException: it could not be loaded for another reason.
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

    candidates = _candidates(where, process_group, no_dist=no_dist)
    return _first_intact(candidates, where, load)[0]


def load_whole(directory: str) -> Any:
    """The newest intact checkpoint as one state dict, in this process: nothing is given to fill."""

    load_into = getattr(state_dict_loader, "_load_state_dict", None)
    planner = getattr(default_planner, "_EmptyStateDictLoadPlanner", None)
    if load_into is None or planner is None:
        sentence = f'cannot load "{directory}" as a whole: this version of torch does not do that'
        remedy = "call ioshape.dcp.load_latest() with a state dict to fill"
        raise failure(-errno.ENOTSUP, sentence, directory, "load", remedy=remedy)

    def load(path: str) -> Any:
        loaded: dict[str, Any] = {}
        load_into(loaded, Reader(path), no_dist=True, planner=planner())
        return loaded

    return _first_intact(_candidates(directory, None, no_dist=True), directory, load)[1]
