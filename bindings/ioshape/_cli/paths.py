# SPDX-License-Identifier: Apache-2.0
"""What commands that read or write files have in common."""

from __future__ import annotations

from pathlib import Path

import click

from ioshape._cli.output import explain

#: FILE…, completed by shells. Whether they can be read is seen one by one.
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path()
)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print all numbers as JSON, instead of tables."
)


def reason(path: str, error: OSError) -> str:
    """The sentence about a file that could not be read."""
    if Path(path).is_dir():
        return f"{path} is a directory; name the files in it, such as {Path(path) / '*.pt'}"
    return explain(error)


def exit_for(failed: bool) -> int:
    """The exit code of a command that goes on with the next file."""
    return 1 if failed else 0
