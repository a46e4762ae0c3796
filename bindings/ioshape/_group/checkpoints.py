# SPDX-License-Identifier: Apache-2.0
"""List, describe, open, verify and remove the group checkpoints of a directory.

In this module a checkpoint is a group checkpoint: one directory "step-…" with the shards of all
ranks.
"""

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
from ioshape._core.structs import (
    Owner,
    called_from_c,
    enum_names,
    keep_failure,
    path_said,
    shared_fields,
    sized,
)
from ioshape._core.text import one_line
from ioshape._group import dcp_contents as families
from ioshape._group.kinds import refuse_others
from ioshape._group.tier import near
from ioshape._load.reader import Reader
from ioshape._native import ffi, lib
from ioshape._tier.drain import check_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._core.report import Progress

Mode = Literal["each", "node", "rank0"]

MODES: dict[int, Any] = enum_names("IOSHAPE_MODE_")


@dataclass(frozen=True)
class Shard:
    """One rank's shard of a checkpoint, and where it is stored."""

    rank: int
    #: path of the file that contains the shard
    file: str
    #: "rank-00007.pt": name of the shard in the zip, or of its own file. If an equal shard is
    #: stored instead, the name of that one
    name: str
    #: position of the shard's first byte in the file; 0 if it is a file of its own
    offset: int
    n_bytes: int
    crc32: int
    #: the lowest rank that saved an equal shard; equal shards are stored once
    same_as: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of all ranks of a job."""

    step: int
    #: path of the checkpoint's directory
    path: str
    #: time of completion, in UTC
    saved: datetime
    #: which ranks wrote files: "each", "node" or "rank0". "dcp" marks a checkpoint of
    #: torch.distributed.checkpoint, which has no shards of ranks and which ioshape.dcp loads
    mode: Mode | Literal["dcp"]
    #: number of ranks that saved it
    ranks: int
    #: number of files, without the manifest
    files: int
    #: total size of these files
    n_bytes: int
    #: number of different shards: 1 if all ranks saved equal objects. 0 for "dcp"
    distinct: int = 0

    def shards(self) -> list[Shard]:
        """Return where the shard of each rank is stored, by rank.

        Raises:
            StorageError: The checkpoint does not exist any more, or is damaged.
            ValueError: It is a checkpoint of torch.distributed.checkpoint.
        """
        self._check_shards()
        with _open(self) as handle:
            return [handle.shard(rank) for rank in range(self.ranks)]

    def _check_shards(self) -> None:
        if self.mode == "dcp":
            raise ValueError(
                f"{self.path} is a checkpoint of torch.distributed.checkpoint, which has no shards "
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
        """Load the object that one rank saved; only the shard's range of the file is read.

        Args:
            rank: The rank whose shard is loaded, from 0 to `ranks` - 1.
            map_location: As in torch.load.
            pickle_module: As in torch.load.
            weights_only: As in torch.load.
            mmap: As in torch.load; only for shards that are files of their own (mode "each").
            verify: False compares no checksums.
            progress: Is called with a Progress at intervals; an exception in it stops the load.
            pickle_load_args: As in torch.load.

        Returns:
            The object.

        Raises:
            DamagedError: A checksum is wrong. The message names the tensor and its position.
            StorageError: The checkpoint does not exist any more, has no such rank, or could not be
                read.
            ValueError: It is a checkpoint of torch.distributed.checkpoint, or `mmap` is set and the
                shard shares its file with others.
        """
        import torch  # noqa: F401, PLC0415 - before any module of ours that needs it

        from ioshape._load import load as _load  # noqa: PLC0415

        self._check_shards()
        # An open checkpoint cannot be removed, so it stays open until all is read.
        with _open(self, operation="load") as handle:
            shard = handle.shard(rank)
            if mmap:
                if self.mode != "each":
                    raise ValueError(
                        f"mmap=True maps a whole file, but the shard of rank {rank} is in "
                        f"{one_line(shard.file)} with others; use mmap=False, or "
                        '"ioshape extract" first'
                    )
                return _load.load(
                    shard.file,
                    map_location,
                    pickle_module,
                    weights_only=weights_only,
                    mmap=True,
                    verify=verify,
                    progress=progress,
                    **pickle_load_args,
                )
            request = _load.LoadRequest(
                map_location, pickle_module, weights_only, pickle_load_args, None, progress
            )
            reader = handle.reader(shard, verify=verify is not False)
            return _load.load_through(reader, request)

    def verify(
        self, *, quick: bool = False, progress: Callable[[Progress], object] | None = None
    ) -> None:
        """Read the checkpoint and compare all checksums, those of the manifest included.

        The method returns if all checksums are right.

        Args:
            quick: Whether to check only the manifest, the sizes of the files and the structure of
                each shard. Default: read all data.
            progress: Is called with a Progress at intervals; an exception in it stops the call.

        Raises:
            DamagedError: A checksum is wrong.
            StorageError: The checkpoint does not exist any more, or could not be read.
        """
        if self.mode == "dcp":
            families.verify(self.path, quick=quick, progress=progress)
            return
        with _open(self, operation="verify") as handle:
            if not quick:
                handle.verify(progress)
                return
            for rank in range(self.ranks):
                with handle.reader(handle.shard(rank), progress=progress) as reader:
                    reader.verify(quick=True)


class Handle(Owner):
    """An open checkpoint of a group. While it is open, no process removes it."""

    def __init__(self, directory: str, step: int | None, operation: str) -> None:
        """Open the checkpoint of this step, or the newest one if step is None."""
        self._context = current()
        super().__init__("checkpoint", directory, self._context)
        self._directory = directory
        self._operation = operation
        path = encoded(directory)
        wanted = lib.IOSHAPE_LATEST if step is None else step
        code = lib.ioshape_checkpoint_open(self._context.pointer, path, wanted, self._out)
        self._check(code)

    def _check(self, code: int) -> None:
        if code:
            raise last_failure(self._directory, self._operation)

    def _info(self) -> Any:
        info = sized("ioshape_checkpoint_info")
        self._check(lib.ioshape_checkpoint_get_info(self._pointer, info))
        return info

    @property
    def directory(self) -> str:
        """The directory that contains the checkpoint, as the caller gave it."""
        return self._directory

    @property
    def serial(self) -> int:
        """The serial number of the checkpoint: higher than those of older ones, equal in a copy."""
        return int(self._info().serial)

    def describe(self) -> Checkpoint:
        """Return the description of the checkpoint."""
        info = self._info()
        told = shared_fields(Checkpoint, info, text=path_said)
        saved = datetime.fromtimestamp(info.saved_s, tz=timezone.utc)
        return Checkpoint(**{**told, "mode": MODES[info.mode], "saved": saved})

    def shard(self, rank: int) -> Shard:
        """Return where the shard of a rank is stored."""
        if rank < 0:
            raise ValueError(f"rank is {rank}; ranks count from 0")
        info = sized("ioshape_shard_info")
        self._check(lib.ioshape_checkpoint_get_shard(self._pointer, rank, info))
        return Shard(**{**shared_fields(Shard, info, text=path_said), "rank": rank})

    def reader(
        self,
        shard: Shard,
        *,
        verify: bool = True,
        shared: bool | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> Reader:
        """Return a reader of one rank's shard, which must be closed before this handle."""

        def opener(options: Any, out: Any) -> None:
            self._check(lib.ioshape_checkpoint_open_shard(self._pointer, shard.rank, options, out))

        return Reader(shard.file, verify=verify, opener=opener, shared=shared, progress=progress)

    def verify(self, progress: Callable[[Progress], object] | None) -> None:
        """Read all of the checkpoint and compare all checksums."""
        teller = Teller(progress)
        user = ffi.new_handle(teller)
        code = lib.ioshape_checkpoint_verify(self._pointer, lib.ioshape_py_progress, user)
        if code and teller.failure is not None:
            raise teller.failure
        self._check(code)


def _open(checkpoint: Checkpoint, operation: str = "load") -> Handle:
    directory = os.path.dirname(checkpoint.path)  # noqa: PTH120 - pathlib would normalize the path
    return Handle(directory, checkpoint.step, operation)


def nearest(directory: str, step: int | None, operation: str, folder: str) -> Handle:
    """Open a checkpoint, or the newest one if step is None; prefer the tier of that folder.

    If the tier and the directory have copies of one checkpoint, the copy on the tier is opened. If
    the copy on the tier is damaged, a FallbackWarning says so, and the directory is searched.
    """
    on_tier = near(directory, folder)
    passed_over = None
    try:
        here = Handle(on_tier, step, operation) if on_tier is not None else None
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
            raise passed_over.error from None  # the directory has none, but the tier has one
        if passed_over is not None:
            warn_passed_over(there.describe().path, [passed_over])
        return there
    # If the directory cannot be read, the copy on the tier is still good.
    with contextlib.suppress(StorageError):
        there = Handle(directory, step, operation)
        if there.serial > here.serial:
            here, there = there, here
        there.close()
    return here


# ---- Public functions --------------------------------------------------------------------------


def latest(
    directory: str | os.PathLike[str],
    *,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> Checkpoint | None:
    """Return the newest complete checkpoint in a directory; None if there is none at all.

    The newest is the one that was saved last, whatever its step. Checkpoints that are being
    written, that are damaged, or that a dead job left behind do not count.

    A checkpoint of torch.distributed.checkpoint is found, too, if the name of its directory ends in
    a number, such as step-1000. Its mode is "dcp". It is complete if its .metadata exists and its
    files have the length that .metadata says.

    Args:
        directory: The directory given to save_group(), or one that contains checkpoints of DCP.
        tier: As in load(): checkpoints that are only on the tier are found, too.

    Returns:
        The Checkpoint, or None.

    Raises:
        NoUsableCheckpointError: There are checkpoints, but none is complete, or they are of another
            kind.
        StorageError: The directory or the tier cannot be read.
    """
    path = os.fspath(directory)
    of_dcp, passed_over = families.newest(path)
    found = [] if of_dcp is None else [_checkpoint(of_dcp)]
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


def _checkpoint(member: families.Member) -> Checkpoint:
    return Checkpoint(mode="dcp", **vars(member))


def checkpoints(
    directory: str | os.PathLike[str],
    *,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> list[Checkpoint]:
    """Return the complete checkpoints in a directory in the order of their saves, oldest first.

    Names and manifests are read, but not the files. Checkpoints of torch.distributed.checkpoint are
    included, as in latest().

    Args:
        directory: The directory given to save_group(), or one that contains checkpoints of DCP.
        tier: As in load(): checkpoints that are only on the tier are included. If both have
            a checkpoint, the copy on the tier is listed.

    Returns:
        A list of Checkpoints; an empty one if there are none.

    Raises:
        StorageError: The directory or the tier cannot be read.
    """
    path = os.fspath(directory)
    of_dcp, _damaged = families.members(path)
    on_tier = near(path, tier_folder(tier))
    groups = {one.step: (serial, one) for serial, one in _of_groups(path)}
    for serial, one in _of_groups(on_tier) if on_tier is not None else ():
        if one.step not in groups or serial >= groups[one.step][0]:
            groups[one.step] = (serial, one)
    by_age = sorted(groups.values(), key=lambda one: one[0])
    found = [*(one for _serial, one in by_age), *map(_checkpoint, of_dcp)]
    return sorted(found, key=lambda one: one.saved) if of_dcp else found


def _of_groups(path: str) -> list[tuple[int, Checkpoint]]:
    """Return the group checkpoints in a directory, each with its serial number."""
    context = current()
    steps, count = ffi.new("uint64_t **"), ffi.new("size_t *")
    code = lib.ioshape_checkpoint_list(context.pointer, encoded(path), steps, count)
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
    """Remove complete checkpoints that are not to be kept, and what dead jobs left behind.

    The oldest are removed first. The newest complete checkpoint stays. A checkpoint that a process
    has open stays, too; on other hosts only where the filesystem's locks reach them. Checkpoints of
    torch.distributed.checkpoint (see latest()) are removed with all that their directories contain.
    ioshape cannot see whether a process is loading one of them.

    Args:
        directory: The directory given to save_group(), or one that contains checkpoints of DCP.
        keep_last: How many of the newest stay; at least 1.
        keep_every: Checkpoints whose step is a multiple of this number stay, too; 0: none.
        dry_run: True removes nothing.

    Returns:
        The steps of the checkpoints that were removed, or with dry_run would be removed.

    Raises:
        StorageError: A checkpoint could not be removed; the others have been removed nevertheless.
            Or the directory has no checkpoint of several files, but checkpoints that are single
            files. For those use keep_last of save(), or "ioshape prune" with a pattern.
        ValueError: `keep_last` is less than 1, or `keep_every` is negative.
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
    """Remove checkpoints like prune(), and return the step and the bytes of each."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; give at least 1")
    if keep_every < 0:
        raise ValueError(f"keep_every is {keep_every}; it takes a number of steps, or 0 for none")
    context = current()
    listener = _Listener()
    user = ffi.new_handle(listener)
    options = sized("ioshape_prune_options")
    options.keep_last = keep_last
    options.keep_every = keep_every
    options.dry_run = dry_run
    options.removing = lib.ioshape_py_removing
    options.removing_user = user
    code = lib.ioshape_checkpoint_prune(context.pointer, encoded(directory), options, ffi.NULL)
    if listener.failure is not None:
        raise listener.failure
    if code:
        raise last_failure(directory, "prune")
    of_dcp = families.remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    if not checkpoints(directory, tier=False):
        refuse_others(directory, "both", "prune")
    return listener.removed + [(one.step, one.n_bytes) for one in of_dcp]
