# SPDX-License-Identifier: Apache-2.0
"""What commands that measure need: a folder of their own, free space, a line of progress."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ioshape._cli.output import SentenceError, human_size, note
from ioshape._core.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PREFIX = ".ioshape-bench-"
_SLACK_BYTES = 64 << 20
_LINGERS_S = 10.0


def check_space(folder: Path, n_bytes: int) -> None:
    """The files of one way at a time are there."""
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    needed = n_bytes + n_bytes // 50 + _SLACK_BYTES
    # Some filesystems do not tell.
    if there.f_blocks and free < needed:
        raise SentenceError(
            f"{folder} has {human_size(free)} free, and the bench needs {human_size(needed)}; free "
            "some, or choose a smaller --size"
        )


def check_memory(n_bytes: int) -> None:
    """So much, and some of everything."""
    needed = n_bytes + _SLACK_BYTES * 4
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            if free < needed:
                raise SentenceError(
                    f"{human_size(free)} of memory are free, and the bench needs "
                    f"{human_size(needed)}; choose a smaller --size"
                )


def check_folder(path: str) -> Path:
    folder = Path(path)
    if not folder.exists():
        raise SentenceError(f"there is no directory {path}; name one on the filesystem to measure")
    if not folder.is_dir():
        raise SentenceError(
            f"{path} is not a directory; name one on the filesystem to measure, such as "
            f"{folder.absolute().parent}"
        )
    return folder


def _terminated(number: int, _frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, also after Ctrl-C and kill."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise SentenceError(
            f"cannot make files in {parent}: {error.strerror}; name a directory that you may write"
        ) from None
    try:
        yield folder
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # An NFS client keeps files that were removed while they were open, for a moment.
        end = time.monotonic() + _LINGERS_S
        while folder.exists() and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.01)
        if folder.exists():
            note(f"ioshape: {folder} could not be removed; remove it")


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal; it is gone at the end."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(one_line(text)))
