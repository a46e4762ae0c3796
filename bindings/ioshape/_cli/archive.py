# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape archive": has Lustre archive files (HSM)."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    human_seconds,
    human_size,
    json_option,
    plural,
    progress_bar,
    say,
    say_json,
)
from ioshape._cli.paths import files_argument
from ioshape._remote import hsm

if TYPE_CHECKING:
    from ioshape._remote.hsm import Archived


def _as_json(one: Archived) -> dict[str, Any]:
    fields = asdict(one)
    return {"bytes" if name == "n_bytes" else name: value for name, value in fields.items()}


def _say(one: Archived) -> None:
    new = human_size(one.archived_bytes) if one.archived_bytes else "nothing"
    say(
        f"{one.path}: archived, {plural(one.files, 'file')}, {human_size(one.n_bytes)}; {new} "
        f"newly archived in {human_seconds(one.total_s)}"
    )


@click.command(short_help="Archive checkpoints with Lustre HSM; on FSx, export them to S3.")
@files_argument
@click.option(
    "--check", is_flag=True, help="Request nothing; only report whether all files are archived."
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=hsm.TIMEOUT_S,
    show_default=True,
    help="Fail after this many seconds without progress.",
)
@json_option
def command(files: tuple[str, ...], check: bool, timeout_s: float, as_json: bool) -> int:
    """Have Lustre archive files, or all files below directories (HSM), and wait until it has.

    On Amazon FSx for Lustre this exports them to the S3 bucket of the data repository.

    Each file is requested as by "lfs hsm_archive". It is done when the metadata server reports that
    the archive has its current content. The manifest.json or .metadata of a checkpoint is requested
    after all its other files are archived. Files that are archived already are not requested again.

    \b
    ioshape archive checkpoints/step-0000001000
    ioshape archive --check checkpoints

    Most metadata servers accept such requests only from root. --check needs read access only.

    Exit code: 0; 1 if something is not archived.
    """
    done = []
    for path in files:
        with progress_bar(path, sys.stderr.isatty() and not as_json) as tell:
            one = hsm.archive(path, ask=not check, timeout_s=timeout_s, progress=tell)
        done.append(one)
        if not as_json:
            _say(one)
    if as_json:
        say_json([_as_json(one) for one in done])
    return 0
