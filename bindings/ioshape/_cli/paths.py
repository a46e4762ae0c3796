# SPDX-License-Identifier: Apache-2.0
"""Arguments, options and helpers that the commands for checkpoints share."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import SentenceError, explain, size_option
from ioshape._group.kinds import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._cli.output import Option

#: name of the directory of a checkpoint that is being written; groups: step, lock domain
ATTEMPT = re.compile(r"\.step-(\d{10,20})\.[0-9a-f]{8}-([0-9a-f]{8})-[0-9a-f]{16}")

# ---- Arguments and options ----------------------------------------------------------------------

#: argument FILE..., completed by shells; commands check each file when they read it
files_argument: Option = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path()
)

#: argument DIR, completed by shells
directory_argument: Option = click.argument("directory", metavar="DIR", type=click.Path())

#: argument URL, of a checkpoint or of the prefix for it
url_argument: Option = click.argument("url", metavar="URL")

endpoint_option: Option = click.option(
    "--endpoint",
    metavar="URL",
    help="URL of the object store.  [default: AWS_ENDPOINT_URL_S3, or Amazon S3]",
)

jobs_option: Option = click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Number of parts that are transferred at the same time.",
)

part_option: Option = click.option(
    "--part-bytes",
    metavar="BYTES",
    default="16M",
    show_default=True,
    callback=size_option,
    help="Size of a part of a large file. Each job takes that much memory.",
)


# ---- Directories and files ----------------------------------------------------------------------


def reason(path: str, error: OSError) -> str:
    """Return the error message about a file that could not be read."""
    if Path(path).is_dir():
        return f"{path} is a directory; name the files in it, such as {Path(path) / '*.pt'}"
    return explain(error)


def check_directory(directory: str) -> None:
    """Raise SentenceError if a path is not a directory."""
    if not Path(directory).is_dir():
        reason = "is not a directory" if Path(directory).exists() else "does not exist"
        raise SentenceError(f"{directory} {reason}; give the directory that save_group() writes to")


def damaged(directory: str, complete: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the path and error of each damaged checkpoint in a directory.

    Args:
        directory: the directory of checkpoints.
        complete: steps of the complete checkpoints, which are skipped.
    """
    from ioshape._group import dcp_contents as families  # noqa: PLC0415
    from ioshape._group.checkpoints import Handle  # noqa: PLC0415

    of_dcp = {path: str(error) for path, error in families.members(directory)[1]}
    yield from of_dcp.items()
    for name in sorted(os.listdir(directory)):  # noqa: PTH208
        match = CHECKPOINT.fullmatch(name)
        path = os.path.join(directory, name)  # noqa: PTH118 - as the user wrote it
        if not match or int(match[1]) in complete or path in of_dcp:
            continue
        try:
            with Handle(directory, int(match[1]), "load"):
                pass  # completed since the caller's listing
        except OSError as error:
            none = isinstance(error, FileNotFoundError)
            yield path, f"{path} has no manifest, so it is not a checkpoint" if none else str(error)


def lock_domain(directory: str) -> str | None:
    """Return the library's id of the lock domain of a directory; None if it is not known."""
    from ioshape._native import ffi, lib  # noqa: PLC0415

    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        digits = ffi.new("char[9]")
        lib.io_lock_domain(fd, digits)
    finally:
        os.close(fd)
    found = ffi.string(digits).decode()
    return None if found == "00000000" else found


def s3() -> Any:
    """Return the module ioshape.s3. Raise SentenceError if a package for it is missing."""
    try:
        return import_module("ioshape.s3")
    except ImportError as error:
        raise SentenceError(str(error)) from None
