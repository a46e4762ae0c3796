# SPDX-License-Identifier: Apache-2.0
"""load_latest(): the newest intact checkpoint, of a group or of files."""

from __future__ import annotations

import errno
import glob
import os
import re
from typing import TYPE_CHECKING, Any

from ioshape._core.errors import (
    NoUsableCheckpointError,
    PassedOver,
    StorageError,
    failure,
    is_our_fault,
    no_usable,
    warn_passed_over,
)
from ioshape._core.under_way import place_of
from ioshape._group.dcp_series import cannot_look
from ioshape._group.generations import latest
from ioshape._group.load import load_group
from ioshape._load.load import load
from ioshape._load.reader import Reader
from ioshape._tier.drain import folder_to_load_from
from ioshape._tier.nearest import check_tier, matching, nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from ioshape._core.report import Progress

# Files that are listed may be gone when they are read: another process keeps the last few. Looks
# at directories that change faster than this end after so many.
_MOST_LOOKS = 16


def load_latest(
    pattern: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    into: Any = None,
    strict: bool = True,
    progress: Callable[[Progress], object] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads the newest checkpoint that is intact.

    Of a directory of generations that is load_group(directory, fallback=True). Of one with
    checkpoints of torch.distributed.checkpoint it is the whole state dict, in this process and its
    memory: torch loads it, and an argument that torch cannot follow is refused.
    ioshape.dcp.load_latest() fills a state dict that is there, by all ranks together.

    Otherwise it is the file of this pattern that was written last, by its time of modification; of
    two with the same time, that with the higher numbers in its name. Files that are damaged, or
    that have no format with checksums, are passed over, and a FallbackWarning says which, and why.
    Each process looks by itself.

    Args:
        pattern: a directory of generations, or a pattern of files as in glob: "run/step-*.pt".
        map_location: as in torch.load.
        pickle_module: as in torch.load.
        weights_only: as in torch.load.
        into: as in load().
        strict: as in load().
        progress: is called with a Progress now and then; an exception in it stops the load.
        tier: as in load(): files that are only there are found, too.
        pickle_load_args: as in torch.load.

    Raises:
        FileNotFoundError: there is none: the job starts for the first time.
        NoUsableCheckpointError: there are some, and none of them can be used. It says why for each,
            and is no FileNotFoundError.
        StorageError: it could not be read. It is an OSError with errno and path, such as a
            PermissionError for a directory that cannot be listed.
        ValueError: the directory has checkpoints of torch.distributed.checkpoint, and an argument
            is for others.

    What torch.load raises for other reasons, this raises.
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
            where, map_location=map_location, pickle_module=pickle_module, tier=tier, **options
        )
    folder = folder_to_load_from(tier)

    def load_ours(place: str) -> Any:
        with Reader(place):  # of other formats torch would load whatever is there
            pass
        return load(place, map_location, pickle_module, mmap=False, tier=False, **options)

    for _look in range(_MOST_LOOKS):
        passed_over: list[PassedOver] = []
        for path in _newest_first(where, folder):
            try:
                loaded = nearest(path, folder, load_ours)
            except StorageError as error:
                if is_our_fault(error):
                    raise
                if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                    break  # it went since, and a newer one may have come
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
        remedy="" if is_pattern else "give a directory of generations, or a pattern: run/*.pt",
    )


def _load_from_directory(where: str, tier: Any, **options: Any) -> Any:
    unusable = None
    try:
        newest = latest(where, tier=tier)
    except NoUsableCheckpointError as error:
        # All ranks look together, and also on the tiers of other nodes: they may know better.
        newest, unusable = None, error
    if newest is not None and newest.mode == "dcp":
        from ioshape._integrations.dcp.newest import (  # noqa: PLC0415 - DCP need not be there
            load_whole,
        )

        _refuse_for_dcp(where, options)
        return load_whole(where)
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


def _refuse_for_dcp(where: str, options: dict[str, Any]) -> None:
    """Raise for an argument that would have another result than torch's own load has.

    torch unpickles what is no tensor, so it cannot promise weights_only.
    """
    usual = {"weights_only": (None, False), "map_location": (None, "cpu"), "strict": (True,)}
    for name, value in options.items():
        if name != "progress" and not any(value is one for one in usual.get(name, (None,))):
            raise ValueError(
                f'cannot load "{where}" with {name}: it has checkpoints of '
                "torch.distributed.checkpoint; fill a state dict with "
                "ioshape.dcp.load_latest(state_dict, directory)"
            )


def _check_listed(pattern: str, where: str) -> None:
    """Raise if a directory of the pattern cannot be read: glob takes such a one for empty."""
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
    """Also those that are only on the tier of that folder."""
    nearer = matching(pattern, folder)
    there = glob.glob(pattern)  # noqa: PTH207 - as the user wrote it
    places = {path: nearer.pop(place_of(path), path) for path in there}
    found = []
    for path, place in (*places.items(), *nearer.items()):
        try:
            time_ns = _time_ns(place)
        except FileNotFoundError:  # gone since
            continue
        except OSError as error:
            raise cannot_look(pattern, place, error) from None
        # Texts and numbers alternate.
        name = [
            int(piece) if number % 2 else piece
            for number, piece in enumerate(re.split(r"(\d+)", path))
        ]
        found.append((time_ns, name, path))
    return [path for _time_ns, _name, path in sorted(found, reverse=True)]


def _time_ns(path: str) -> int:
    """When the file was last written; of a link that leads nowhere, when it was made."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return os.lstat(path).st_mtime_ns
