# SPDX-License-Identifier: Apache-2.0
"""ioshape verify."""

from __future__ import annotations

import errno
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape.cli._files import exit_for, files_argument, reason
from ioshape.cli._output import human_size, one_line, say, say_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape import Progress


@contextmanager
def _progress_bar(path: str, wanted: bool) -> Iterator[Callable[[Progress], object] | None]:
    """On stderr, and gone when it is over: what stays is the line on stdout."""
    if not wanted:
        yield None
        return
    from rich import progress as rich  # noqa: PLC0415 - takes longer than many a file
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415

    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(escape(one_line(path)), total=None)

        def tell(progress: Progress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes)

        yield tell


def _verify(path: str, with_bar: bool) -> dict[str, Any]:
    """What came of one file, as in the JSON."""
    import ioshape  # noqa: PLC0415

    begin = time.perf_counter()
    state, error_text = "ok", None
    n_bytes: int | None = None
    try:
        with _progress_bar(path, with_bar) as tell:
            ioshape.verify(path, progress=tell)
        n_bytes = Path(path).stat().st_size
    except ioshape.DamagedError as error:
        state, error_text = "damaged", str(error)
    except OSError as error:
        state = "without checksums" if error.errno == errno.ENODATA else "unreadable"
        error_text = reason(path, error)
    return {
        "path": path,
        "state": state,
        "error": error_text,
        "bytes": n_bytes,
        "seconds": round(time.perf_counter() - begin, 6),
    }


@click.command(short_help="Compare every checksum in files.")
@files_argument
@click.option("-q", "--quiet", is_flag=True, help="Print only what is not ok.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON: a list of files.")
def command(files: tuple[str, ...], quiet: bool, as_json: bool) -> int:
    """Reads files of torch.save or ioshape completely, and compares every checksum in them.

    Prints a line for each file: that it is ok, or what is damaged, in which tensor, and where in
    the file. On a terminal a bar shows how far it is.

    \b
    ioshape verify checkpoints/*.pt
    ioshape verify --quiet latest.pt && train --resume latest.pt

    Exit code: 0 if every file is ok; 1 if one is damaged, cannot be read, or has no checksums.
    """
    outcomes: list[dict[str, Any]] = []
    for path in files:
        outcome = _verify(path, not quiet and not as_json and sys.stderr.isatty())
        outcomes.append(outcome)
        if as_json:
            continue
        if outcome["error"]:
            say(outcome["error"])
        elif not quiet:
            say(f"{path}: ok, {human_size(outcome['bytes'])}")
    if as_json:
        say_json(outcomes)
    return exit_for(any(outcome["error"] for outcome in outcomes))
