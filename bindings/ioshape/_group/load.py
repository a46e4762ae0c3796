# SPDX-License-Identifier: Apache-2.0
"""load_group(): this rank's part of the newest complete generation."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, Any

from ioshape._core.errors import (
    CoordinatorError,
    PassedOver,
    StorageError,
    failure,
    is_our_fault,
    warn_passed_over,
)
from ioshape._core.job import Job, job
from ioshape._core.log import logger
from ioshape._group.generations import Generation, Handle, Part, nearest
from ioshape._group.group import opened_for_reading
from ioshape._group.kinds import refuse_others
from ioshape._load import unpickle
from ioshape._load.into import filling_of
from ioshape._load.load import load_through
from ioshape._slots.slots import Slot, slot
from ioshape._tier.drain import folder_to_load_from
from ioshape._tier.nearest import check_tier

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from ioshape._core.report import Progress

# How long a generation that rank 0 sees may stay unseen here.
_PATIENCE_S = 10.0


def load_group(
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    rank: int | None = None,
    fallback: bool = False,
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
    """Loads this rank's object from the newest complete generation in a directory.

    Without `step` all ranks of the job (see ioshape.job()) call it: rank 0 looks which generation
    is the newest, and all load from the same one. With it, and in a program of one process, nobody
    waits for anybody. Only this rank's range of the files is read, and its checksums are compared.

    With `fallback` it is the newest one that is intact: before anything is loaded, all ranks
    together read all of it once, and compare its checksums. Newer ones that are damaged are passed
    over, the same on all ranks, and a FallbackWarning says which, and why.

    If all ranks saved the same, as in data-parallel training, a job of any number of ranks loads
    it. Otherwise a generation of another number of ranks has no part that would be this rank's: say
    whose part you want by `rank`, as often as you like, or go through
    ioshape.generations(directory). What several ranks of a node want is read from the storage once:
    it comes through the page cache.

    Args:
        directory: where the generations are, as for save_group().
        step: of the generation. Default: the newest complete one.
        rank: whose part. With rank=0 every rank loads what rank 0 saved. Default: this rank's.
        fallback: True takes an older generation where the newest is damaged.
        map_location: as in torch.load.
        pickle_module: as in torch.load.
        weights_only: as in torch.load.
        verify: False compares no checksums.
        into: as in load().
        strict: as in load().
        progress: is called with a Progress now and then; an exception in it stops the load.
        tier: as in load(): generations that are there are among those in the directory, and are
            loaded from there. If this rank's part of such a copy is damaged, a FallbackWarning
            names it, and what it was drained to is loaded.
        pickle_load_args: as in torch.load.

    Raises:
        FileNotFoundError: there is no generation: the job starts for the first time; or none of
            this step.
        NoUsableCheckpointError: there are checkpoints, and none of them can be used: damaged,
            incomplete, or of another kind. It is no FileNotFoundError.
        ValueError: it was saved by another number of ranks, whose parts differ, and `rank` was not
            given.
        DamagedError: a checksum is wrong.
        MismatchError: this rank's part does not have what `into` has.
        StorageError: it could not be read. It is an OSError with errno and path.

    What torch.load raises for other reasons, this raises.
    """
    where, folder = os.fspath(directory), folder_to_load_from(tier)
    place = job()
    if fallback and step is not None:
        raise ValueError("fallback=True looks for a generation by itself; leave out step")
    passed_over: list[PassedOver] = []
    # A group makes its directory, and a program by itself should not by looking for it.
    agreed = step is None and (place.world_size > 1 or (fallback and os.path.isdir(where)))  # noqa: PTH112

    def load_from(generation: Handle, passed_over: list[PassedOver]) -> Any:
        found = generation.describe()
        part = generation.part(_whose(found, place, rank))
        if passed_over:
            warn_passed_over(found.path, passed_over)
        # Only this rank wants a part of its own.
        is_own = rank is None and found.distinct == found.ranks == place.world_size
        with _Turn(part) as turn:
            return load_through(
                generation.reader(
                    part, verify=verify is not False, shared=False if is_own else None
                ),
                lambda file: unpickle.load(
                    file,
                    map_location,
                    pickle_module,
                    weights_only=weights_only,
                    mmap=False,
                    **pickle_load_args,
                ),
                turn.told_by(progress),
                (part.offset, part.n_bytes),
                filling_of(into, strict=strict, map_location=map_location),
                is_plain=pickle_module is None
                and not pickle_load_args
                and weights_only is not False,
                map_location=map_location,
            )

    # Open until all is read: nobody removes it meanwhile.
    try:
        found = (
            _agreed(where, folder, passed_over, intact=fallback)
            if agreed
            else nearest(where, step, "load", folder)
        )
    except FileNotFoundError:
        if step is None:
            refuse_others(where, "group")
            check_tier(folder)
        raise
    with found as generation:
        try:
            return load_from(generation, passed_over)
        except StorageError as error:
            drained = None if is_our_fault(error) else _drained(generation, where)
            if drained is None:
                raise
            passed_over.append(PassedOver(generation.describe().path, error))
    with drained:
        return load_from(drained, passed_over[-1:])


def _agreed(where: str, folder: str, passed_over: list[PassedOver], *, intact: bool) -> Handle:
    """What all ranks load. Adds to passed_over."""
    group = opened_for_reading(where, folder)
    directory, step, newer = group.latest(intact=intact)
    passed_over += newer
    return _found(where if directory == group.directory else directory, step)


def _drained(generation: Handle, where: str) -> Handle | None:
    """What a copy on the tier has been drained to."""
    if generation.directory == where:
        return None
    with contextlib.suppress(StorageError):
        there = Handle(where, generation.describe().step, "load")
        if there.serial == generation.serial:
            return there
        there.__exit__()
    return None


def _found(where: str, step: int | None) -> Handle:
    """What rank 0 has found: a network filesystem may show it here a little later.

    That it is not there must not look like "there is none yet" to one rank alone.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return Handle(where, step, "load")
        except FileNotFoundError as error:
            if time.monotonic() > end:
                raise failure(
                    -errno.ESTALE,
                    f'cannot load generation {step} of "{where}": rank 0 has found it, and this '
                    "rank has not",
                    where,
                    "load",
                    remedy="is it the same filesystem on all nodes, and did nobody remove it?",
                ) from error
            time.sleep(0.1)


def _whose(generation: Generation, place: Job, rank: int | None) -> int:
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"rank is a number, not {type(rank).__name__}")
        if not 0 <= rank < generation.ranks:
            raise ValueError(
                f"{generation.path} has no rank {rank}: it was saved by {generation.ranks} ranks"
            )
        return rank
    if generation.ranks != place.world_size and generation.distinct == 1:
        return 0
    if generation.ranks != place.world_size:
        job_has = f"{place.world_size} rank{'s' if place.world_size > 1 else ''}"
        raise ValueError(
            f"{generation.path} was saved by {generation.ranks} ranks, and this job has {job_has}: "
            "load_group(..., rank=k) loads the part of rank k, and "
            "ioshape.generations(directory)[-1].load(k) as well, for k from 0 to "
            f"{generation.ranks - 1}"
        )
    return place.rank


# ---- Turns --------------------------------------------------------------------------------------


class _Turn:
    """A slot of the pool that the part lies in, while it is read: a restart is a storm, too."""

    def __init__(self, part: Part) -> None:
        self._slot: Slot | None = None
        self._told = 0
        try:
            self._slot = slot(part.file, nbytes=part.n_bytes)
        except CoordinatorError as error:
            # A job that waits for its checkpoint is not kept from it.
            logger().warning("reads without a turn: %s", error)

    def __enter__(self) -> _Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._slot is not None:
            self._slot.release()

    def told_by(
        self, progress: Callable[[Progress], object] | None
    ) -> Callable[[Progress], object] | None:
        """The caller's, and the slot's: that shows that the work goes on."""
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
