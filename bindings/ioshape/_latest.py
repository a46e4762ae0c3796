# SPDX-License-Identifier: Apache-2.0
"""load_latest(): loads the newest intact checkpoint of a directory or of a file pattern."""

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
from ioshape._core.under_way import canonical
from ioshape._group.checkpoints import latest
from ioshape._group.dcp_families import cannot_look
from ioshape._group.load import load_group
from ioshape._load.load import load
from ioshape._load.reader import Reader
from ioshape._tier.drain import folder_to_load_from
from ioshape._tier.nearest import check_tier, matching, nearest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from ioshape._core.report import Progress

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
