# SPDX-License-Identifier: Apache-2.0
"""What commands that read or write files have in common."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ioshape._cli.output import SentenceError, explain

#: FILE…, completed by shells. Whether they can be read is seen one by one.
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path()
)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print all numbers as JSON, instead of tables."
)


def _plot_path(_context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    if path is not None:
        from ioshape._cli.trace import plot  # noqa: PLC0415 - matplotlib is slow

        plot.check(path)
        there = Path(path) if Path(path).exists() else Path(path).absolute().parent
        if not os.access(there, os.W_OK):  # better now than after the measurement
            raise SentenceError(
                f"cannot write {path}; name a file in a directory that you may write"
            )
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
