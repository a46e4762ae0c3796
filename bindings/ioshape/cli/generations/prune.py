# SPDX-License-Identifier: Apache-2.0
"""ioshape prune."""

from __future__ import annotations

import sys

import click

from ioshape._text import one_line
from ioshape.cli.generations.look import check_directory, directory_argument
from ioshape.cli.output import SentenceError, UsageSentenceError, human_size, plural, say, say_json


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
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print what goes as JSON.")
def command(
    directory: str, keep_last: int, keep_every: int, dry_run: bool, yes: bool, as_json: bool
) -> int:
    """Removes complete generations that are not to be kept, and what dead processes left behind.

    The newest complete one stays in any case, and so does one that somebody reads. It asks before,
    and where there is no terminal to ask on it removes nothing without --yes.

    \b
    ioshape prune checkpoints --keep-last 3
    ioshape prune checkpoints --keep-last 3 --keep-every 10000 --yes

    Exit code: 0; 1 if one could not be removed, or the answer was no; 2 if nobody could be asked.
    """
    from ioshape._group.generations import remove  # noqa: PLC0415

    check_directory(directory)
    going = remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=True)
    if not dry_run and not yes:
        _ask(directory, going)
    if not dry_run:
        # Also if nothing is to go: what dead processes left does.
        going = remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=False)
    if as_json:
        steps = [{"step": step, "bytes": n_bytes} for step, n_bytes in going]
        say_json({"directory": directory, "dry_run": dry_run, "generations": steps})
        return 0
    for step, n_bytes in going:
        say(f"{'would remove' if dry_run else 'removed'} step {step}: {human_size(n_bytes)}")
    say(f"{_counted(going)} of {directory} {'would go' if dry_run else 'removed'}")
    return 0


def _counted(going: list[tuple[int, int]]) -> str:
    size = human_size(sum(n_bytes for _step, n_bytes in going))
    return f"{plural(len(going), 'generation')} ({size})"


def _ask(directory: str, going: list[tuple[int, int]]) -> None:
    """Ends the command unless somebody says yes."""
    if not sys.stdin.isatty():
        raise UsageSentenceError(
            f'cannot ask whether to remove {_counted(going)} of "{directory}": there is no '
            "terminal; add --yes, or look first with --dry-run"
        )
    what = "what dead processes left"
    if going:
        first, last = min(step for step, _ in going), max(step for step, _ in going)
        steps = f"step {first}" if len(going) == 1 else f"steps {first} to {last}"
        what = f"{_counted(going)}, {steps}, and {what}"
    if not click.confirm(one_line(f'Remove {what} in "{directory}"?'), err=True):
        raise SentenceError("nothing was removed")
