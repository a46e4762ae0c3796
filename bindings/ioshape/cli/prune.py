# SPDX-License-Identifier: Apache-2.0
"""ioshape prune."""

from __future__ import annotations

import sys

import click

from ioshape.cli._generations import check_directory, directory_argument
from ioshape.cli._output import human_size, one_line, plural, say


@click.command(short_help="Remove generations that are not to be kept.")
@directory_argument
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1, max=2**32 - 1),
    required=True,
    help="Keep the newest N complete ones.",
)
@click.option(
    "--keep-every",
    metavar="M",
    type=click.IntRange(min=0, max=2**64 - 1),
    default=0,
    help="Besides, keep those whose step is a multiple of M.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(directory: str, keep_last: int, keep_every: int, dry_run: bool, yes: bool) -> int:
    """Removes complete generations that are not to be kept, and what dead processes left behind.

    The newest complete one stays in any case, and so does one that somebody reads. On a terminal
    it asks before. Prints a line for each that goes.

    \b
    ioshape prune checkpoints --keep-last 3
    ioshape prune checkpoints --keep-last 3 --keep-every 10000 --yes

    Exit code: 0; 1 if one could not be removed, or nothing was after a "no".
    """
    from ioshape._generations import remove  # noqa: PLC0415

    check_directory(directory)
    going = remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=True)
    size = human_size(sum(n_bytes for _step, n_bytes in going))
    what = f"{plural(len(going), 'generation')} ({size})"
    if dry_run:
        for step, n_bytes in going:
            say(f"would remove step {step}: {human_size(n_bytes)}")
        say(f"{what} in {directory} would go")
        return 0
    if going and not yes and sys.stdin.isatty() and sys.stderr.isatty():
        first, last = going[0][0], going[-1][0]
        steps = f"step {first}" if len(going) == 1 else f"steps {first} to {last}"
        question = one_line(f"Remove {what} of {directory}, {steps}?")
        if not click.confirm(question, err=True):
            return 1
    # Also if nothing is to go: what dead processes left does.
    removed = remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=False)
    for step, n_bytes in removed:
        say(f"removed step {step}: {human_size(n_bytes)}")
    size = human_size(sum(n_bytes for _step, n_bytes in removed))
    say(f"{plural(len(removed), 'generation')} ({size}) of {directory} removed")
    return 0
