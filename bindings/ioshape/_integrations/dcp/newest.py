# SPDX-License-Identifier: Apache-2.0
"""Load the newest intact checkpoint of a directory on all ranks: ioshape.dcp.load_latest()."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ioshape._core.errors import (
    PassedOver,
    StorageError,
    failure,
    is_our_fault,
    no_usable,
    warn_passed_over,
)
from ioshape._group import dcp_families as families
from ioshape._group.kinds import refuse_others
from ioshape._integrations.dcp.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import LoadPlanner


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


def _candidates(directory: str, group: Any, *, no_dist: bool) -> list[Candidate]:
    """Return the candidates as rank 0 sees them, because a checkpoint may appear meanwhile."""

    def look() -> list[Candidate]:
        found = families.newest_first(directory)
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
    """Load the newest intact checkpoint in a directory into a state dict.

    All ranks call this function, as they call dcp.load(), and load the same checkpoint. All of them
    pass over damaged checkpoints, and a FallbackWarning names these and says why.

    Args:
        state_dict: The state dict to fill, as in dcp.load().
        directory: A directory that contains checkpoints whose names end in a number, such as
            step-1000. The newest is the one that was saved last, whatever its number.
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

    candidates = _candidates(where, process_group, no_dist=no_dist)
    return _first_intact(candidates, where, load)
