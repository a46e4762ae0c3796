# SPDX-License-Identifier: Apache-2.0
"""Load this rank's shard of a group checkpoint: load_group()."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import time
from typing import TYPE_CHECKING, Any

from ioshape._core.errors import (
    CoordinatorError,
    NoUsableCheckpointError,
    PassedOver,
    StorageError,
    failure,
    is_our_fault,
    no_usable,
    warn_passed_over,
)
from ioshape._core.job import Job, job
from ioshape._core.log import logger
from ioshape._core.under_way import canonical
from ioshape._group.checkpoints import Checkpoint, Handle, Shard, latest
from ioshape._group.checkpoints import nearest as nearest_checkpoint
from ioshape._group.dcp_contents import cannot_look
from ioshape._group.group import opened_for_reading
from ioshape._group.kinds import refuse_others
from ioshape._load.into import filling_of
from ioshape._load.load import LoadRequest, load, load_through
from ioshape._load.reader import Reader
from ioshape._slots.slots import Slot, slot
from ioshape._tier.drain import check_tier, folder_to_load_from, matching, nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from ioshape._core.report import Progress


# seconds that a checkpoint which rank 0 sees may stay invisible to this rank
_MOST_WAIT_S = 10.0


def load_group(
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    rank: int | None = None,
    fallback: bool = False,
    healthy: bool = False,
    map_location: Any = None,
    pickle_module: Any = None,
    weights_only: bool | None = None,
    verify: bool | None = None,
    into: Any = None,
    strict: bool = True,
    progress: Callable[[Progress], object] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load this rank's object from the newest complete checkpoint in a directory.

    Without `step`, all ranks of the job (see ioshape.job()) call this function. Rank 0 finds the
    newest checkpoint, and all ranks load from it. With `step`, and in a program of one process, no
    rank waits for another one. Each rank reads only its own range of the files, and compares its
    checksums.

    With `fallback`, the newest intact checkpoint is loaded. Before anything is loaded, all ranks
    together read the whole checkpoint once and compare its checksums. All ranks pass over newer
    checkpoints that are damaged, and a FallbackWarning names these and says why. With `healthy`,
    they also pass over checkpoints whose content looked wrong when they were saved.

    If all ranks saved equal objects, as in data-parallel training, a job of any number of ranks can
    load the checkpoint. Otherwise a checkpoint of another number of ranks has no shard for this
    rank. In that case choose shards with `rank`, in as many calls as you like, or use
    ioshape.checkpoints(directory). If several ranks of a node load one shard, the storage is read
    once, through the page cache.

    Args:
        directory: The directory of the checkpoints, as in save_group().
        step: The step of the checkpoint. Default: the newest complete one.
        rank: The rank whose shard is loaded. With rank=0 every rank loads what rank 0 saved.
            Default: this rank.
        fallback: True loads an older checkpoint if the newest is damaged.
        healthy: True implies `fallback`, and also loads an older checkpoint if the newest raised an
            alarm (setting "examine"). Checkpoints that were not examined count as healthy.
        map_location: As in torch.load.
        pickle_module: As in torch.load.
        weights_only: As in torch.load.
        verify: False compares no checksums.
        into: As in load().
        strict: As in load().
        progress: Is called with a Progress at intervals; an exception in it stops the load.
        tier: As in load(): checkpoints on the tier count like those in the directory, and are
            loaded from the tier. If this rank's shard on the tier is damaged, a FallbackWarning
            names it, and the drained copy in the directory is loaded.
        pickle_load_args: As in torch.load.

    Returns:
        The object.

    Raises:
        FileNotFoundError: There is no checkpoint, so this is the first start of the job; or there
            is none of this step.
        NoUsableCheckpointError: There are checkpoints, but all are damaged, incomplete, or of
            another kind. It is not a FileNotFoundError.
        ValueError: Another number of ranks saved the checkpoint, their shards differ, and `rank`
            was not given. Or `step` was given together with `fallback` or `healthy`.
        DamagedError: A checksum is wrong.
        MismatchError: This rank's shard does not have what `into` has.
        StorageError: The checkpoint could not be read. It is an OSError with errno and path.

    For other reasons this raises what torch.load raises.
    """
    where, folder = os.fspath(directory), folder_to_load_from(tier)
    this_job = job()
    if (fallback or healthy) and step is not None:
        word = "healthy" if healthy else "fallback"
        raise ValueError(f"{word}=True chooses the checkpoint; leave out step")
    fallback = fallback or healthy
    passed_over: list[PassedOver] = []
    # A group creates its directory. A program of one process must not create it by a search.
    agreed = step is None and (this_job.world_size > 1 or (fallback and os.path.isdir(where)))  # noqa: PTH112

    def load_from(checkpoint: Handle, passed_over: list[PassedOver]) -> Any:
        found = checkpoint.describe()
        shard = checkpoint.shard(_whose(found, this_job, rank))
        if passed_over:
            warn_passed_over(found.path, passed_over)
        # A shard that only this rank reads need not go through the page cache.
        is_own = rank is None and found.distinct == found.ranks == this_job.world_size
        with _Turn(shard) as turn:
            request = LoadRequest(
                map_location,
                pickle_module,
                weights_only,
                pickle_load_args,
                filling_of(into, strict=strict, map_location=map_location),
                turn.told_by(progress),
            )
            reader = checkpoint.reader(
                shard, verify=verify is not False, shared=False if is_own else None
            )
            return load_through(reader, request)

    # An open checkpoint cannot be removed, so it stays open until all is read.
    try:
        found = (
            _agreed(where, folder, passed_over, intact=fallback, healthy=healthy)
            if agreed
            else nearest_checkpoint(where, step, "load", folder)
        )
    except FileNotFoundError:
        if step is None:
            refuse_others(where, "group")
            check_tier(folder)
        raise
    with found as checkpoint:
        try:
            return load_from(checkpoint, passed_over)
        except StorageError as error:
            drained = None if is_our_fault(error) else _drained(checkpoint, where)
            if drained is None:
                raise
            passed_over.append(PassedOver(checkpoint.describe().path, error))
    with drained:
        return load_from(drained, passed_over[-1:])


def _agreed(
    where: str, folder: str, passed_over: list[PassedOver], *, intact: bool, healthy: bool
) -> Handle:
    """Return the checkpoint that all ranks agree to load; add newer ones to passed_over."""
    group = opened_for_reading(where, folder)
    directory, step, newer = group.latest(intact=intact, healthy=healthy)
    passed_over += newer
    return _found(where if directory == group.directory else directory, step)


def _drained(checkpoint: Handle, where: str) -> Handle | None:
    """Open the copy in the directory `where` of a checkpoint on the tier; None if it has none."""
    if checkpoint.directory == where:
        return None
    with contextlib.suppress(StorageError):
        there = Handle(where, checkpoint.describe().step, "load")
        if there.serial == checkpoint.serial:
            return there
        there.close()
    return None


def _found(where: str, step: int | None) -> Handle:
    """Open the checkpoint that rank 0 has found; wait until this node sees it.

    A network filesystem may show it here a little later. A FileNotFoundError on one rank alone
    would look like a first start to that rank, so the function raises ESTALE instead.
    """
    end = time.monotonic() + _MOST_WAIT_S
    while True:
        try:
            return Handle(where, step, "load")
        except FileNotFoundError as error:
            if time.monotonic() > end:
                raise failure(
                    -errno.ESTALE,
                    f'cannot load checkpoint {step} of "{where}": rank 0 has found it, and this '
                    "rank has not",
                    where,
                    "load",
                    remedy="check that all nodes mount the same filesystem and that the "
                    "checkpoint still exists",
                ) from error
            time.sleep(0.1)


def _whose(checkpoint: Checkpoint, this_job: Job, rank: int | None) -> int:
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank must be a number, not {type(rank).__name__}")
        if not 0 <= rank < checkpoint.ranks:
            raise ValueError(
                f"{checkpoint.path} has no rank {rank}: it was saved by {checkpoint.ranks} ranks"
            )
        return rank
    if checkpoint.ranks != this_job.world_size and checkpoint.distinct == 1:
        return 0
    if checkpoint.ranks != this_job.world_size:
        job_has = f"{this_job.world_size} rank{'s' if this_job.world_size > 1 else ''}"
        raise ValueError(
            f"{checkpoint.path} was saved by {checkpoint.ranks} ranks, and this job has {job_has}: "
            "load_group(..., rank=k) loads the shard of rank k, and "
            "ioshape.checkpoints(directory)[-1].load(k) as well, for k from 0 to "
            f"{checkpoint.ranks - 1}"
        )
    return this_job.rank


# ---- Turns --------------------------------------------------------------------------------------


class _Turn:
    """A slot for reading, of the pool that the shard's file belongs to.

    When a job restarts, its ranks read as many bytes at once as they write in a save.
    """

    def __init__(self, shard: Shard) -> None:
        self._slot: Slot | None = None
        self._told = 0
        try:
            self._slot = slot(shard.file, nbytes=shard.n_bytes)
        except CoordinatorError as error:
            # Waiting for a turn is a courtesy: a failing coordinator must not keep a job from its
            # checkpoint.
            logger().warning("reading without a slot: %s", error)

    def __enter__(self) -> _Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.release()

    def told_by(
        self, progress: Callable[[Progress], object] | None
    ) -> Callable[[Progress], object] | None:
        """Return a progress callback that reports bytes to the slot and calls the caller's.

        The reports prove that the work goes on, so the coordinator does not take the slot away.
        """
        held = self._slot
        if held is None:
            return progress

        def tell(now: Progress) -> None:
            if now.done_bytes > self._told:
                held.pace(now.done_bytes - self._told)
                self._told = now.done_bytes
            if progress is not None:
                progress(now)

        return tell


# ---- load_latest() -------------------------------------------------------------------------------


# A listed file may be gone when it is read, because another process keeps only the last few. Then
# the directory is listed again, at most this many times.
_MOST_LOOKS = 16


def load_latest(
    pattern: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    healthy: bool = False,
    into: Any = None,
    strict: bool = True,
    progress: Callable[[Progress], object] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load the newest intact checkpoint.

    If `pattern` is a directory of group checkpoints, this is load_group(directory, fallback=True).

    Otherwise the newest file that matches the pattern is loaded, by modification time. If two files
    have the same time, the file with the higher numbers in its name is newer. Damaged files, and
    files in a format without checksums, are skipped; a FallbackWarning lists them with the reasons.
    Each process searches independently.

    Args:
        pattern: A directory of checkpoints, or a glob pattern of files. Example: `run/step-*.pt`.
        map_location: As in torch.load.
        pickle_module: As in torch.load.
        weights_only: As in torch.load.
        healthy: True also skips checkpoints whose content looked wrong when they were saved
            (setting "examine"). Checkpoints that were not examined count as healthy.
        into: As in load().
        strict: As in load().
        progress: Called with a Progress now and then. An exception in it stops the load.
        tier: As in load(). Files that exist only on the tier are found, too.
        pickle_load_args: As in torch.load.

    Raises:
        FileNotFoundError: There is no checkpoint: the job starts for the first time.
        NoUsableCheckpointError: Checkpoints exist, but none can be used. The message gives the
            reason for each. This class does not derive from FileNotFoundError.
        StorageError: A checkpoint could not be read. It is an OSError with errno and path, such as
            a PermissionError for a directory that cannot be listed.
        ValueError: The newest checkpoint of the directory is one of torch.distributed.checkpoint.
            Load it with ioshape.dcp.load_latest().

    Other errors of torch.load are raised unchanged.
    """
    where = os.fspath(pattern)
    options = {
        "weights_only": weights_only,
        "into": into,
        "strict": strict,
        "progress": progress,
        **pickle_load_args,
    }
    if os.path.isdir(where):  # noqa: PTH112
        return _load_from_directory(
            where,
            map_location=map_location,
            pickle_module=pickle_module,
            tier=tier,
            healthy=healthy,
            **options,
        )
    folder = folder_to_load_from(tier)

    def load_ours(nearest_path: str) -> Any:
        with Reader(
            nearest_path
        ) as reader:  # raises for other formats, which torch would load unverified
            if healthy:
                reader.check_healthy()
        return load(nearest_path, map_location, pickle_module, mmap=False, tier=False, **options)

    for _look in range(_MOST_LOOKS):
        passed_over: list[PassedOver] = []
        for path in _newest_first(where, folder):
            try:
                loaded = nearest(path, folder, load_ours)
            except StorageError as error:
                if is_our_fault(error):
                    raise
                if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                    break  # removed since the listing; there may be a newer file now
                passed_over.append(PassedOver(path, error))
            else:
                warn_passed_over(path, passed_over)
                return loaded
        else:
            break
    if passed_over:
        raise no_usable(where, passed_over)
    _check_listed(where, where)
    check_tier(folder)
    is_pattern = glob.has_magic(where)
    raise failure(
        -errno.ENOENT,
        f'cannot load "{where}": '
        + ("no file matches this pattern yet" if is_pattern else "there is no such file"),
        where,
        "load",
        remedy="" if is_pattern else "give a directory of checkpoints, or a pattern: run/*.pt",
    )


def _load_from_directory(where: str, tier: Any, **options: Any) -> Any:
    unusable = None
    try:
        newest = latest(where, tier=tier)
    except NoUsableCheckpointError as error:
        # latest() searched from this rank only. load_group() below searches on all ranks together,
        # and on the tiers of other nodes, so it may still find a usable checkpoint.
        newest, unusable = None, error
    if newest is not None and newest.mode == "dcp":
        raise ValueError(
            f'cannot load "{where}": its newest checkpoint is one of torch.distributed.checkpoint; '
            "fill a state dict with ioshape.dcp.load_latest(state_dict, directory)"
        )
    try:
        return load_group(where, fallback=True, tier=tier, **options)
    except FileNotFoundError:
        if unusable is None:
            raise
        raise unusable from None
    except NoUsableCheckpointError as error:
        if unusable is None or error.passed_over:
            raise
        raise unusable from None


def _check_listed(pattern: str, where: str) -> None:
    """Raise if a directory of the pattern cannot be read: glob would treat it as empty."""
    above, name = os.path.split(pattern)
    folders = [above or "."]
    if glob.has_magic(above) and above != pattern:
        _check_listed(above, where)
        folders = [folder for folder in glob.glob(above) if os.path.isdir(folder)]  # noqa: PTH112, PTH207
    for folder in folders:
        path = folder if glob.has_magic(name) else os.path.join(folder, name)  # noqa: PTH118
        try:
            if path == folder:
                os.scandir(path).close()
            else:
                os.lstat(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise cannot_look(where, path, error) from None


def _newest_first(pattern: str, folder: str) -> list[str]:
    """Return the paths that match a pattern, newest first, with files that only a tier holds.

    Args:
        pattern: the glob pattern.
        folder: the folder of the tier; "" without a tier.
    """
    nearer = matching(pattern, folder)
    there = glob.glob(pattern)  # noqa: PTH207 - as the user wrote it
    nearest = {path: nearer.pop(canonical(path), path) for path in there}
    found = []
    for path, nearest_path in (*nearest.items(), *nearer.items()):
        try:
            time_ns = _time_ns(nearest_path)
        except FileNotFoundError:  # removed since the listing
            continue
        except OSError as error:
            raise cannot_look(pattern, nearest_path, error) from None
        # Texts and numbers alternate in the key, so "step-10" sorts behind "step-9".
        name = [
            int(piece) if number % 2 else piece
            for number, piece in enumerate(re.split(r"(\d+)", path))
        ]
        found.append((time_ns, name, path))
    return [path for _time_ns, _name, path in sorted(found, reverse=True)]


def _time_ns(path: str) -> int:
    """Return when a file was last written; for a dangling link, when the link was made."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return os.lstat(path).st_mtime_ns
