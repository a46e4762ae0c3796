# SPDX-License-Identifier: Apache-2.0
"""What commands that read or write files have in common."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ioshape.cli.output import SentenceError, explain

#: FILE…, completed by shells. Whether they can be read is seen one by one.
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path()
)


json_option = click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write all numbers to a file as JSON; - for stdout, instead of tables.",
)


def _plot_path(_context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        from ioshape.cli.trace import plot  # noqa: PLC0415 - matplotlib is slow

        plot.check(path)
        check_file_to_write(path)
    return path


plot_option = click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    callback=_plot_path,
    help="Draw who did what when, as .svg, .png or .pdf. Needs matplotlib: "
    "pip install 'ioshape[plot]'.",
)


def reason(path: str, error: OSError) -> str:
    """The sentence about a file that could not be read."""
    if Path(path).is_dir():
        return f"{path} is a directory; name the files in it, such as {Path(path) / '*.pt'}"
    return explain(error)


def exit_for(failed: bool) -> int:
    """The exit code of a command that goes on with the next file."""
    return 1 if failed else 0


def check_file_to_write(path: str | None) -> None:
    """Better before the measurement than after it. Leaves nothing behind."""
    if path in (None, "-"):
        return
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise SentenceError(f"there is no directory for {path}; make it first")
    try:
        if not file.exists():
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            file.unlink()
        elif file.is_file():  # pipes and devices would notice
            os.close(os.open(file, os.O_WRONLY | os.O_CLOEXEC))
    except FileExistsError:
        pass  # a link to nothing so far
    except OSError as error:
        raise _not_to_be_written(path, error) from None


def write_file(path: str | None, text: str) -> None:
    """What was measured, where it was asked for."""
    if path is None:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _not_to_be_written(path, error) from None


def _not_to_be_written(path: str, error: OSError) -> SentenceError:
    return SentenceError(
        f"cannot write {path}: {error.strerror}; name a file in a directory that you may write"
    )
