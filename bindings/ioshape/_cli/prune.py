# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape prune": removes old checkpoints from a directory, or old files of a pattern."""

from __future__ import annotations

import glob
import os
import sys
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import (
    SentenceError,
    UsageSentenceError,
    human_size,
    json_option,
    plural,
    say,
    say_json,
)
from ioshape._cli.paths import ATTEMPT, check_directory
from ioshape._core.text import one_line

if TYPE_CHECKING:
    from ioshape._save.retention import Kept


@click.command(short_help="Remove old checkpoints.")
@click.argument("paths", metavar="DIR|PATTERN...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1, max=2**32 - 1),
    required=True,
    help="Keep the newest N complete checkpoints.",
)
@click.option(
    "--keep-every",
    metavar="M",
    type=click.IntRange(min=0, max=2**64 - 1),
    default=0,
    help="In a directory, also keep checkpoints whose step is a multiple of M.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def command(
    paths: tuple[str, ...],
    keep_last: int,
    keep_every: int,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove old checkpoints.

    In a directory it removes checkpoints, and leftovers of dead processes. With a pattern it
    removes files. The newest complete checkpoint always stays, and so does a checkpoint that a
    process reads. The command asks for confirmation. Without a terminal it needs --yes.

    A pattern must match one family of files in one directory: their names differ only in the last
    number, as step-100.pt and step-200.pt. The newest files are those that were written last. Every
    byte of a file that is kept is verified. Links, damaged files and files of other formats are
    neither removed nor counted.

    Examples:

    \b
    ioshape prune checkpoints --keep-last 3
    ioshape prune checkpoints --keep-last 3 --keep-every 10000 --yes
    ioshape prune "run/step-*.pt" --keep-last 3

    Exit code: 0; 1 if a removal failed, nothing matches, or the answer was no; 2 if there is no
    terminal for the question.
    """
    if len(paths) > 1 or not os.path.isdir(paths[0]):  # noqa: PTH112
        return _prune_files(paths, keep_last, keep_every, dry_run, yes, as_json)
    from ioshape._group.checkpoints import remove  # noqa: PLC0415

    (directory,) = paths
    going = remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=True)
    _refuse_other_directory(directory)
    if not dry_run and not yes:
        _ask(directory, going)
    if not dry_run:
        # This call also removes leftovers of dead processes, so it is needed even if no checkpoint
        # is to be removed.
        going = remove(directory, keep_last=keep_last, keep_every=keep_every, dry_run=False)
    if as_json:
        steps = [{"step": step, "bytes": n_bytes} for step, n_bytes in going]
        say_json({"directory": directory, "dry_run": dry_run, "checkpoints": steps})
        return 0
    for step, n_bytes in going:
        say(f"{'would remove' if dry_run else 'removed'} step {step}: {human_size(n_bytes)}")
    say(f"{_counted(going)} of {directory} {'would be removed' if dry_run else 'removed'}")
    return 0


def _refuse_other_directory(directory: str) -> None:
    """Raise SentenceError if a directory has files but no checkpoint. It may be empty."""
    from ioshape._group.checkpoints import checkpoints  # noqa: PLC0415
    from ioshape._group.kinds import CHECKPOINT  # noqa: PLC0415

    names = os.listdir(directory)  # noqa: PTH208
    if not names or any(CHECKPOINT.fullmatch(name) or ATTEMPT.fullmatch(name) for name in names):
        return
    if not checkpoints(directory, tier=False):
        raise SentenceError(
            f'cannot prune "{directory}": it has no checkpoint; give the directory that '
            "save_group() writes to, or a pattern of files"
        )


# ---- Files --------------------------------------------------------------------------------------


def _prune_files(
    paths: tuple[str, ...], keep_last: int, keep_every: int, dry_run: bool, yes: bool, as_json: bool
) -> int:
    from ioshape._save.retention import prune  # noqa: PLC0415

    if keep_every:
        raise UsageSentenceError(
            "--keep-every works only with a directory of checkpoints; leave it out"
        )
    what = " ".join(paths)
    path = _one_family(paths, what)
    directory = os.path.dirname(path)  # noqa: PTH120
    _kept, going = prune(path, keep_last, dry_run=True)
    if not dry_run and not yes and going:
        counted = _counted_files(going)
        names = f"{counted}, {going[-1].name} to {going[0].name}"
        _ask_about(counted, names, directory or ".")
    if not dry_run:
        _kept, going = prune(path, keep_last, dry_run=False)
    going = going[::-1]
    if as_json:
        files = [
            {"path": os.path.join(directory, one.name), "bytes": one.n_bytes}  # noqa: PTH118
            for one in going
        ]
        say_json({"pattern": what, "dry_run": dry_run, "files": files})
        return 0
    for one in going:
        name = os.path.join(directory, one.name)  # noqa: PTH118
        say(f"{'would remove' if dry_run else 'removed'} {name}: {human_size(one.n_bytes)}")
    say(f"{_counted_files(going)} of {what} {'would be removed' if dry_run else 'removed'}")
    return 0


def _one_family(paths: tuple[str, ...], what: str) -> str:
    """Return one of the files that the arguments match.

    Raises:
        SentenceError: they match no file, several families, or not all files of a family.
    """
    from ioshape._core.names import numbered  # noqa: PLC0415
    from ioshape._save.retention import family_of  # noqa: PLC0415

    found = []
    for path in paths:  # several paths if the shell has expanded the pattern
        found += [path] if os.path.lexists(path) else glob.glob(path)  # noqa: PTH207
    alone = len(paths) == 1 and not glob.has_magic(what)
    if alone and (not found or numbered(os.path.basename(what)) is None):  # noqa: PTH119
        check_directory(what)
    if not found:
        raise SentenceError(f'cannot prune "{what}": no file matches it')
    try:
        families = {(os.path.dirname(one), family_of(one).family) for one in found}  # noqa: PTH120
    except ValueError as error:
        raise SentenceError(str(error)) from None
    if len(families) > 1:
        names = [os.path.join(above, "*".join(ends)) for above, ends in sorted(families)]  # noqa: PTH118
        raise SentenceError(
            f'cannot prune "{what}": it matches several families, such as "{names[0]}" and '
            f'"{names[1]}"; give one of them'
        )
    ((directory, family),) = families
    matched = {os.path.basename(one) for one in found}  # noqa: PTH119
    for name in sorted(os.listdir(directory or ".")):  # noqa: PTH208
        parts = numbered(name)
        if name not in matched and parts is not None and parts.family == family:
            whole = os.path.join(directory, "*".join(family))  # noqa: PTH118
            raise SentenceError(
                f'cannot prune "{what}": "{name}" belongs to the same family; give "{whole}"'
            )
    return found[0]


# ---- Asking -------------------------------------------------------------------------------------


def _counted(going: list[tuple[int, int]]) -> str:
    size = human_size(sum(n_bytes for _step, n_bytes in going))
    return f"{plural(len(going), 'checkpoint')} ({size})"


def _counted_files(going: list[Kept]) -> str:
    return f"{plural(len(going), 'file')} ({human_size(sum(one.n_bytes for one in going))})"


def _ask(directory: str, going: list[tuple[int, int]]) -> None:
    what = "leftovers of dead processes"
    if going:
        first, last = min(step for step, _ in going), max(step for step, _ in going)
        steps = f"step {first}" if len(going) == 1 else f"steps {first} to {last}"
        what = f"{_counted(going)}, {steps}, and {what}"
    _ask_about(_counted(going), what, directory)


def _ask_about(counted: str, what: str, directory: str) -> None:
    """Ask for confirmation. Raise SentenceError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise UsageSentenceError(
            f'cannot ask for confirmation to remove {counted} of "{directory}": there is no '
            "terminal; add --yes, or check first with --dry-run"
        )
    if not click.confirm(one_line(f'Remove {what} in "{directory}"?'), err=True):
        raise SentenceError("nothing was removed")
