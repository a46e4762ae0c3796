# SPDX-License-Identifier: Apache-2.0
"""What commands about directories of generations have in common."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import SentenceError
from ioshape._group.kinds import GENERATION
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape.types import Generation

ATTEMPT = re.compile(r"\.step-(\d{10,20})\.[0-9a-f]{8}-([0-9a-f]{8})-[0-9a-f]{16}")

#: DIR, completed by shells.
directory_argument = click.argument("directory", metavar="DIR", type=click.Path())


@dataclass(frozen=True)
class Unfinished:
    """A generation that is being written, or that a dead job has left."""

    step: int
    path: str
    #: when something was last written to it
    touched: datetime
    n_bytes: int
    #: None: it cannot be told from here
    alive: bool | None


def check_directory(directory: str) -> None:
    """Fails unless it can be one with generations."""
    if not Path(directory).is_dir():
        reason = "is not a directory" if Path(directory).exists() else "does not exist"
        raise SentenceError(f"{directory} {reason}; give the directory that save_group() was given")


def open_step(directory: str, step: int | None) -> Generation:
    """The generation of a step, or the newest one."""
    from ioshape._core.config import tier_folder  # noqa: PLC0415
    from ioshape._group.generations import generations, nearest  # noqa: PLC0415

    check_directory(directory)
    for one in generations(directory) if step is not None else ():
        if (one.mode, one.step) == ("dcp", step):
            return one
    with nearest(directory, step, "load", tier_folder(None)) as handle:
        return handle.describe()


def damaged(directory: str, complete: set[int]) -> Iterator[tuple[str, str]]:
    """Those that are called generations and do not hold: path, and why."""
    from ioshape._group import dcp_series as series  # noqa: PLC0415
    from ioshape._group.generations import Handle  # noqa: PLC0415

    of_dcp = {path: str(error) for path, error in series.members(directory)[1]}
    yield from of_dcp.items()
    for name in sorted(os.listdir(directory)):  # noqa: PTH208
        match = GENERATION.fullmatch(name)
        path = os.path.join(directory, name)  # noqa: PTH118 - as the user wrote it
        if not match or int(match[1]) in complete or path in of_dcp:
            continue
        try:
            with Handle(directory, int(match[1]), "load"):
                pass  # it was completed just now
        except OSError as error:
            none = isinstance(error, FileNotFoundError)
            yield path, f"{path} has no manifest, so it is no generation" if none else str(error)


def unfinished(directory: str) -> list[Unfinished]:
    """What is being written, and what dead jobs left, by step."""
    found = []
    for name in sorted(os.listdir(directory)):  # noqa: PTH208
        match = ATTEMPT.fullmatch(name)
        if match:
            path = os.path.join(directory, name)  # noqa: PTH118
            try:
                found.append(_look(path, int(match[1]), match[2]))
            except OSError:  # it has gone, or is complete by now
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
    """Whether its writer has it locked. From another machine or mount that may not be seen."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(fd)
    return False if domain == lock_domain(path) else None


def lock_domain(directory: str) -> str | None:
    """Where locks there are seen, as the library names it; None if that is not known."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        digits = ffi.new("char[9]")
        lib.io_lock_domain(fd, digits)
    finally:
        os.close(fd)
    found = ffi.string(digits).decode()
    return None if found == "00000000" else found
