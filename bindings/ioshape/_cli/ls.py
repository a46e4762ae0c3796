# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape ls": lists checkpoints in a directory, on a tier, or on an object store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    Table,
    columns,
    for_json,
    human_size,
    json_option,
    plural,
    remark,
    say,
    say_json,
)
from ioshape._cli.paths import (
    ATTEMPT,
    check_directory,
    damaged,
    directory_argument,
    endpoint_option,
    lock_domain,
    s3,
)

if TYPE_CHECKING:
    from ioshape._tier.tier import Copy
    from ioshape.s3 import Remote
    from ioshape.types import Checkpoint

_STATES = {
    True: "being written",
    False: "left by a dead process",
    None: "unfinished",
}


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written, or that a dead job has left."""

    step: int
    path: str
    #: time of the last write to one of its files
    touched: datetime
    n_bytes: int
    #: whether its writer lives; None if this host cannot tell
    alive: bool | None


def _unfinished(directory: str) -> list[Unfinished]:
    """Return the unfinished checkpoints in a directory, by step."""
    found = []
    for name in sorted(os.listdir(directory)):  # noqa: PTH208
        match = ATTEMPT.fullmatch(name)
        if match:
            path = os.path.join(directory, name)  # noqa: PTH118
            try:
                found.append(_look(path, int(match[1]), match[2]))
            except OSError:  # removed or completed by now
                continue
    return found


def _look(path: str, step: int, domain: str) -> Unfinished:
    statuses = [os.stat(path)]  # noqa: PTH116
    with os.scandir(path) as entries:
        statuses += [entry.stat(follow_symlinks=False) for entry in entries]
    touched = max(status.st_mtime for status in statuses)
    return Unfinished(
        step=step,
        path=path,
        touched=datetime.fromtimestamp(touched, tz=timezone.utc),
        n_bytes=sum(status.st_size for status in statuses[1:]),
        alive=_is_alive(path, domain),
    )


def _is_alive(path: str, domain: str) -> bool | None:
    """Return whether the writer holds its lock; None if this host may not see the lock."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(fd)
    return False if domain == lock_domain(path) else None


def _local(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def _state(directory: str, one: Checkpoint) -> str:
    """Return the state of a complete checkpoint: in the directory, or only on the tier.

    Resolved paths are compared, because both paths may go through links.
    """
    above = os.path.dirname(os.path.realpath(one.path))  # noqa: PTH120
    return "complete" if above == os.path.realpath(directory) else "on the tier"


def _show(directory: str, complete: list[Checkpoint], others: list[Unfinished]) -> None:
    table = Table(*columns(">step", "<saved", "<mode", ">ranks", ">files", ">size", "<state"))
    for one in complete:
        table.add(
            str(one.step),
            _local(one.saved),
            one.mode,
            str(one.ranks),
            str(one.files),
            human_size(one.n_bytes),
            _state(directory, one),
        )
    for other in others:
        size = human_size(other.n_bytes)
        state = _STATES[other.alive]
        table.add(str(other.step), _local(other.touched), "-", "-", "-", size, state)
    table.show()


# ---- A tier, and object stores ------------------------------------------------------------------


def _show_tier(folder: str, as_json: bool) -> int:
    """Print the checkpoints on a tier, waiting and drained. Return the exit code."""
    from ioshape._core.context import Context  # noqa: PLC0415
    from ioshape._tier.tier import Tier, is_draining  # noqa: PLC0415

    with contextlib.closing(Tier(Context(), folder)) as tier:
        copies = tier.copies()
        states = _states(copies, is_draining(folder))
    listed = list(zip(copies, states, strict=True))
    if as_json:
        say_json({"tier": folder, "copies": [_copy_json(copy, state) for copy, state in listed]})
        return 0
    if not copies:
        say(f"There is no checkpoint on {folder}.")
        return 0
    table = Table(*columns("<path", "<saved", "<kind", ">size", "<state"))
    for copy, state in listed:
        table.add(copy.path, _local(copy.saved), _kind(copy), human_size(copy.n_bytes), state)
    table.show()
    waiting = [copy for copy in copies if copy.is_waiting]
    say()
    say(
        f"{plural(len(copies), 'checkpoint')}, {human_size(sum(one.n_bytes for one in copies))}; "
        f"{human_size(sum(one.n_bytes for one in waiting))} not drained yet"
    )
    return 0


def _states(copies: list[Copy], drains: bool) -> list[str]:
    """Return the state of each copy. If a drain runs, it is at the first copy that waits."""
    states = ["waits" if one.is_waiting else "drained" for one in copies]
    if drains and states[:1] == ["waits"]:
        states[0] = "is drained now"
    return states


def _kind(copy: Copy) -> str:
    return "directory" if copy.is_directory else "file"


def _copy_json(copy: Copy, state: str) -> dict[str, Any]:
    return {
        "path": copy.path,
        "copy_path": copy.copy_path,
        "kind": _kind(copy),
        "saved": copy.saved.isoformat(),
        "bytes": copy.n_bytes,
        "state": state,
    }


def _show_remote(url: str, endpoint: str | None, as_json: bool) -> int:
    """Print the complete checkpoints below a URL. Return the exit code."""
    found: list[Remote] = s3().checkpoints(url, endpoint=endpoint)
    if as_json:
        say_json({"url": url, "checkpoints": [for_json(one) for one in found]})
        return 0
    if not found:
        say(f"There is no complete checkpoint below {url}.")
        return 0
    table = Table(*columns("<url", "<uploaded", "<kind", ">files", ">size"))
    for one in found:
        table.add(one.url, _local(one.uploaded), one.kind, str(one.files), human_size(one.n_bytes))
    table.show()
    return 0


# ---- The command --------------------------------------------------------------------------------


@click.command(short_help="List checkpoints in a directory, a tier or an object store.")
@directory_argument
@endpoint_option
@json_option
def command(directory: str, endpoint: str | None, as_json: bool) -> int:
    """List the checkpoints in a directory, oldest first.

    It lists checkpoints of save_group(), and checkpoints of torch.distributed.checkpoint whose
    names end in a number. The order is that in which they were saved, whatever their steps. The
    last complete one is the newest, which load_group() loads.

    Incomplete checkpoints follow: those that are being written, and those that dead processes left,
    which the next save removes. A lock tells them apart. If this machine cannot see the lock, the
    state is "unfinished". Sizes and times of incomplete checkpoints are current values.

    If the directory is a tier, it lists your checkpoints there, and which of them wait to be
    drained. For s3://BUCKET/KEY it lists the complete checkpoints that "ioshape upload" made there.

    Examples:

    \b
    ioshape ls checkpoints
    ioshape ls /local/nvme
    ioshape ls s3://bucket/run
    ioshape ls --json checkpoints | jq '.checkpoints[-1].step'

    Exit code: 0; 1 if the directory could not be read, or a checkpoint in it is damaged.
    """
    if directory.startswith("s3:"):
        return _show_remote(directory, endpoint, as_json)
    import ioshape  # noqa: PLC0415
    from ioshape._tier.tier import is_tier, of_another_user, other_owner  # noqa: PLC0415

    check_directory(directory)
    if (owner := other_owner(directory)) is not None:
        remark(f"ioshape: {of_another_user(directory, owner)}")
    elif is_tier(directory):
        return _show_tier(directory, as_json)
    complete = ioshape.checkpoints(directory)
    others = _unfinished(directory)
    broken = list(damaged(directory, {one.step for one in complete}))
    if as_json:
        say_json(
            {
                "directory": directory,
                "checkpoints": [
                    {**for_json(one), "state": _state(directory, one)} for one in complete
                ],
                "unfinished": [{**for_json(one), "state": _STATES[one.alive]} for one in others],
                "damaged": [{"path": path, "error": why} for path, why in broken],
            }
        )
    elif complete or others:
        _show(directory, complete, others)
    elif not broken:
        say(f"There is no checkpoint in {Path(directory).resolve()}.")
    if not as_json:
        for _path, why in broken:
            remark(f"ioshape: {why}")
    return 1 if broken else 0
