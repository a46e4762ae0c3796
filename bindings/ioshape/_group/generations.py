# SPDX-License-Identifier: Apache-2.0
"""Generations on disk: what there is, what lies in it, and what goes."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from ioshape._core.callbacks import Teller
from ioshape._core.config import tier_folder
from ioshape._core.context import current, encoded
from ioshape._core.errors import (
    NoUsableCheckpointError,
    PassedOver,
    StorageError,
    is_our_fault,
    last_failure,
    no_usable,
    warn_passed_over,
)
from ioshape._core.structs import Owner, called_from_c, keep_failure, sized
from ioshape._core.text import one_line
from ioshape._group import dcp_contents as contents
from ioshape._group import dcp_series as series
from ioshape._group.kinds import refuse_others
from ioshape._group.tier import near
from ioshape._load.reader import Reader
from ioshape._native import ffi, lib
from ioshape._tier.nearest import check_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._core.report import Progress

Mode = Literal["each", "node", "rank0"]

MODES: dict[int, Mode] = {
    lib.IOSHAPE_MODE_EACH: "each",
    lib.IOSHAPE_MODE_NODE: "node",
    lib.IOSHAPE_MODE_RANK0: "rank0",
}


@dataclass(frozen=True)
class Part:
    """What one rank saved, and where it lies."""

    rank: int
    #: path of the file that it lies in
    file: str
    #: "rank-00007.pt": its name in the zip, or of the file itself; of an equal part that of the
    #: rank whose part is stored
    name: str
    #: of its first byte in the file; 0 if it is a file of its own
    offset: int
    n_bytes: int
    crc32: int
    #: the lowest rank that saved the same; equal parts are stored once
    same_as: int


@dataclass(frozen=True)
class Generation:
    """A complete checkpoint of all ranks of a job."""

    step: int
    #: of its directory
    path: str
    #: when it was completed; in UTC
    saved: datetime
    #: "each", "node" or "rank0": which ranks wrote files. "dcp": it is a checkpoint of
    #: torch.distributed.checkpoint, which has no parts, and which ioshape.dcp loads
    mode: Mode | Literal["dcp"]
    #: how many saved it
    ranks: int
    #: how many there are, the manifest not counted
    files: int
    #: of these files
    n_bytes: int
    #: how many of the ranks' parts differ: 1 if all ranks saved the same. 0 for "dcp"
    distinct: int = 0

    def parts(self) -> list[Part]:
        """Where each rank's part lies.

        Raises:
            StorageError: the generation is not there any more, or does not hold.
        """
        self._check_parts()
        with _open(self) as handle:
            return [handle.part(rank) for rank in range(self.ranks)]

    def _check_parts(self) -> None:
        if self.mode == "dcp":
            raise ValueError(
                f"{self.path} is a checkpoint of torch.distributed.checkpoint, which has no parts "
                "of ranks; load it with ioshape.dcp.Reader, or ioshape.dcp.load_latest()"
            )

    def load(
        self,
        rank: int,
        map_location: Any = None,
        pickle_module: Any = None,
        *,
        weights_only: bool | None = None,
        mmap: bool | None = None,
        verify: bool | None = None,
        progress: Callable[[Progress], object] | None = None,
        **pickle_load_args: Any,
    ) -> Any:
        """Loads what a rank saved; only its range of the file is read.

        Args:
            rank: whose part, from 0 to `ranks` - 1.
            map_location: as in torch.load.
            pickle_module: as in torch.load.
            weights_only: as in torch.load.
            mmap: as in torch.load; only for parts that are files of their own (mode "each").
            verify: False compares no checksums.
            progress: is called with a Progress now and then; an exception in it stops the load.
            pickle_load_args: as in torch.load.

        Raises:
            DamagedError: a checksum is wrong; the message names the tensor and where it lies.
            StorageError: the generation is not there any more, has no such rank, or could not be
                read.
        """
        import torch  # noqa: F401, PLC0415 - before any module of ours that needs it

        from ioshape._load import load as _load  # noqa: PLC0415
        from ioshape._load import unpickle  # noqa: PLC0415

        self._check_parts()
        options = {"weights_only": weights_only, **pickle_load_args}
        # Open until all is read: nobody removes it meanwhile.
        with _open(self, operation="load") as handle:
            part = handle.part(rank)
            if mmap:
                if self.mode != "each":
                    raise ValueError(
                        f"mmap=True maps a whole file, but the part of rank {rank} lies in "
                        f"{one_line(part.file)} beside others; use mmap=False, or "
                        '"ioshape extract" first'
                    )
                return _load.load(
                    part.file,
                    map_location,
                    pickle_module,
                    mmap=True,
                    verify=verify,
                    progress=progress,
                    **options,
                )
            return _load.load_through(
                handle.reader(part, verify=verify is not False),
                lambda file: unpickle.load(
                    file, map_location, pickle_module, mmap=False, **options
                ),
                progress,
                (part.offset, part.n_bytes),
            )

    def verify(
        self, *, share: float = 1.0, progress: Callable[[Progress], object] | None = None
    ) -> None:
        """Reads all of it and compares all checksums, those of the manifest included.

        Returns if every one is right.

        Args:
            share: of the data that is read, from 1 (all) to 0 (none: only whether the manifest, the
                files' sizes and each part's structure hold). Those of the manifest are compared
                only with 1.
            progress: is called with a Progress now and then; an exception in it stops the call.

        Raises:
            DamagedError: one is not.
            StorageError: it is not there any more, or could not be read.
        """
        if self.mode == "dcp":
            contents.verify(self.path, share=share, progress=progress)
            return
        with _open(self, operation="verify") as handle:
            if share == 1:
                handle.verify(progress)
                return
            for rank in range(self.ranks):
                with handle.reader(handle.part(rank), progress=progress) as reader:
                    reader.verify(share)


class Handle(Owner):
    """A generation that is open: while it is, nothing removes it."""

    def __init__(self, directory: str, step: int | None, operation: str) -> None:
        """The newest one if step is None."""
        self._context = current()
        super().__init__("generation", directory, self._context)
        self._directory = directory
        self._operation = operation
        path = encoded(directory)
        wanted = lib.IOSHAPE_LATEST if step is None else step
        code = lib.ioshape_generation_open(self._context.pointer, path, wanted, self._out)
        self._check(code)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go()

    def _check(self, code: int) -> None:
        if code:
            raise last_failure(self._directory, self._operation)

    def _info(self) -> Any:
        info = sized("ioshape_generation_info")
        self._check(lib.ioshape_generation_get_info(self._pointer, info))
        return info

    @property
    def directory(self) -> str:
        """In which it lies."""
        return self._directory

    @property
    def serial(self) -> int:
        """Higher than those of older ones; a copy has the same."""
        return int(self._info().serial)

    def describe(self) -> Generation:
        """What it is."""
        info = self._info()
        return Generation(
            step=info.step,
            path=os.fsdecode(ffi.string(info.path)),
            saved=datetime.fromtimestamp(info.saved_s, tz=timezone.utc),
            mode=MODES[info.mode],
            ranks=info.ranks,
            files=info.files,
            n_bytes=info.bytes,
            distinct=info.distinct,
        )

    def part(self, rank: int) -> Part:
        """Where a rank's part lies."""
        if rank < 0:
            raise ValueError(f"rank is {rank}; ranks count from 0")
        info = sized("ioshape_part_info")
        self._check(lib.ioshape_generation_get_part(self._pointer, rank, info))
        return Part(
            rank=rank,
            file=os.fsdecode(ffi.string(info.file)),
            name=os.fsdecode(ffi.string(info.name)),
            offset=info.offset,
            n_bytes=info.bytes,
            crc32=info.crc32,
            same_as=info.same_as,
        )

    def reader(
        self,
        part: Part,
        *,
        verify: bool = True,
        shared: bool | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> Reader:
        """Of one rank's part; to be closed before this."""

        def opener(options: Any, out: Any) -> None:
            self._check(lib.ioshape_generation_open_part(self._pointer, part.rank, options, out))

        return Reader(part.file, verify=verify, opener=opener, shared=shared, progress=progress)

    def verify(self, progress: Callable[[Progress], object] | None) -> None:
        """Reads and compares all of it."""
        teller = Teller(progress)
        user = ffi.new_handle(teller)
        code = lib.ioshape_generation_verify(self._pointer, lib.ioshape_py_progress, user)
        if code and teller.failure is not None:
            raise teller.failure
        self._check(code)


def _open(generation: Generation, operation: str = "load") -> Handle:
    directory = os.path.dirname(generation.path)  # noqa: PTH120 - of a path that may be odd
    return Handle(directory, generation.step, operation)


def nearest(directory: str, step: int | None, operation: str, folder: str) -> Handle:
    """The newest one if step is None. Of two that are the same, that on the tier of that folder.

    If what is on the tier does not hold, a FallbackWarning says so, and the directory is looked at.
    """
    place = near(directory, folder)
    passed_over = None
    try:
        here = Handle(place, step, operation) if place is not None else None
    except FileNotFoundError:
        here = None
    except StorageError as error:
        if is_our_fault(error):
            raise
        here, passed_over = None, PassedOver(error.path, error)
    if here is None:
        try:
            there = Handle(directory, step, operation)
        except FileNotFoundError:
            if passed_over is None:
                raise
            raise passed_over.error from None  # there is something, though not here
        if passed_over is not None:
            warn_passed_over(there.describe().path, [passed_over])
        return there
    # Whatever the directory cannot be looked at for, this one is nearer.
    with contextlib.suppress(StorageError):
        there = Handle(directory, step, operation)
        if there.serial > here.serial:
            here, there = there, here
        there.__exit__()
    return here


# ---- What users call ---------------------------------------------------------------------------


def latest(
    directory: str | os.PathLike[str],
    *,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> Generation | None:
    """The newest complete generation in a directory; None if there is none at all.

    The newest is what was saved last, whatever its step.
    What is being written, damaged, or left behind by a job that died does not count.

    A checkpoint of torch.distributed.checkpoint counts as a generation of mode "dcp" if the name of
    its directory ends in a number: step-1000. It is complete if its .metadata is in place, and its
    files are as long as that says.

    Args:
        directory: what was given to save_group(), or one with checkpoints of DCP in it.
        tier: as in load(): generations that are only there are found, too.

    Raises:
        NoUsableCheckpointError: there are checkpoints, and none of them is complete, or they are of
            another kind.
        StorageError: the directory or the tier cannot be read.
    """
    path = os.fspath(directory)
    of_dcp, passed_over = series.newest(path)
    found = [] if of_dcp is None else [_generation(of_dcp)]
    try:
        with nearest(path, None, "load", tier_folder(tier)) as handle:
            found.append(handle.describe())
    except FileNotFoundError:
        if not found and passed_over:
            raise no_usable(path, passed_over) from None
        if not found:
            refuse_others(path, "group")
            check_tier(tier_folder(tier))
    except NoUsableCheckpointError:
        if not found:
            raise
    return max(found, key=lambda one: one.saved, default=None)


def _generation(member: series.Member) -> Generation:
    return Generation(mode="dcp", **vars(member))


def generations(
    directory: str | os.PathLike[str],
    *,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> list[Generation]:
    """The complete generations in a directory, oldest first: in the order of their saves.

    A look at names and manifests; the files themselves are not read. Checkpoints of
    torch.distributed.checkpoint are among them, as in latest().

    Args:
        directory: what was given to save_group(), or one with checkpoints of DCP in it.
        tier: as in load(): generations that are only there are among them, and of those that are in
            both places the copies on the tier.

    Raises:
        StorageError: the directory or the tier cannot be read.
    """
    path = os.fspath(directory)
    of_dcp, _damaged = series.members(path)
    place = near(path, tier_folder(tier))
    groups = {one.step: (serial, one) for serial, one in _of_groups(path)}
    for serial, one in _of_groups(place) if place is not None else ():
        if one.step not in groups or serial >= groups[one.step][0]:
            groups[one.step] = (serial, one)
    by_age = sorted(groups.values(), key=lambda one: one[0])
    found = [*(one for _serial, one in by_age), *map(_generation, of_dcp)]
    return sorted(found, key=lambda one: one.saved) if of_dcp else found


def _of_groups(path: str) -> list[tuple[int, Generation]]:
    """With their serial numbers."""
    context = current()
    steps, count = ffi.new("uint64_t **"), ffi.new("size_t *")
    code = lib.ioshape_generation_list(context.pointer, encoded(path), steps, count)
    if code == -errno.ENOENT:
        return []
    if code:
        raise last_failure(path, "load")
    found = ffi.unpack(steps[0], count[0]) if count[0] else []
    lib.ioshape_free(steps[0])
    complete = []
    for step in found:
        try:
            with Handle(path, step, "load") as handle:
                complete.append((handle.serial, handle.describe()))
        except OSError:  # removed or replaced just now
            continue
    return complete


def prune(
    directory: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int = 0,
    dry_run: bool = False,
) -> list[int]:
    """Removes complete generations that are not to be kept, oldest first, and what dead jobs left.

    The newest complete one stays, and so does one that somebody has open, also on another host
    where locks reach. Of checkpoints of torch.distributed.checkpoint (see latest()) the directories
    go, with all that is in them; nobody can see there whether one is being loaded.

    Args:
        directory: what was given to save_group(), or one with checkpoints of DCP in it.
        keep_last: how many of the newest stay; at least 1.
        keep_every: besides, those whose step is a multiple of this stay; 0: none.
        dry_run: True removes nothing.

    Returns:
        The steps of those that went, or with dry_run would go.

    Raises:
        StorageError: one could not be removed. The others have been, nevertheless. Or the directory
            has no generation, but checkpoints that are files: keep_last of save(), and "ioshape
            prune" with a pattern are for those.
    """
    path = os.fspath(directory)
    removed = remove(path, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    return [step for step, _n_bytes in removed]


class _Listener:
    def __init__(self) -> None:
        self.removed: list[tuple[int, int]] = []
        self.failure: BaseException | None = None


@called_from_c(onerror=keep_failure)
def ioshape_py_removing(listener: _Listener, step: int, n_bytes: int) -> None:
    listener.removed.append((step, n_bytes))


def remove(
    directory: str, *, keep_last: int, keep_every: int, dry_run: bool
) -> list[tuple[int, int]]:
    """As prune(); steps and bytes."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least the newest generation stays")
    if keep_every < 0:
        raise ValueError(f"keep_every is {keep_every}; it is a number of steps, or 0 for none")
    context = current()
    listener = _Listener()
    user = ffi.new_handle(listener)
    options = sized("ioshape_prune_options")
    options.keep_last = keep_last
    options.keep_every = keep_every
    options.dry_run = dry_run
    options.removing = lib.ioshape_py_removing
    options.removing_user = user
    code = lib.ioshape_generation_prune(context.pointer, encoded(directory), options, ffi.NULL)
    if listener.failure is not None:
        raise listener.failure
    if code:
        raise last_failure(directory, "prune")
    of_dcp = series.remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    if not generations(directory, tier=False):
        refuse_others(directory, "both", "prune")
    return listener.removed + [(one.step, one.n_bytes) for one in of_dcp]
