# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape verify": compares the checksums in files and checkpoints."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ioshape._cli.output import explain, human_size, json_option, progress_bar, say, say_json
from ioshape._cli.paths import check_directory, damaged, files_argument, reason
from ioshape._group.kinds import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape.types import Progress


class _Way(NamedTuple):
    """The way of verification."""

    #: whether only the structure is checked
    quick: bool
    #: whether a progress bar is shown
    with_bar: bool


def _outcome(
    path: str, verify: Callable[[Callable[[Progress], object] | None], int], way: _Way
) -> dict[str, Any]:
    """Verify one file or checkpoint. Return its result for JSON.

    `verify` does the work, and returns the size in bytes.
    """
    import ioshape  # noqa: PLC0415

    begin = time.perf_counter()
    state, error_text = "ok", None
    n_bytes: int | None = None
    try:
        with progress_bar(path, way.with_bar) as tell:
            n_bytes = verify(tell)
    except ioshape.DamagedError as error:
        state, error_text = "damaged", str(error)
    except OSError as error:
        state = "without checksums" if error.errno == errno.ENODATA else "unreadable"
        error_text = explain(error)
    return {
        "path": path,
        "state": state,
        "error": error_text,
        "quick": way.quick,
        "bytes": n_bytes,
        "seconds": round(time.perf_counter() - begin, 6),
    }


def _failed(path: str, state: str, sentence: str) -> dict[str, Any]:
    return {
        "path": path,
        "state": state,
        "error": sentence,
        "quick": True,
        "bytes": None,
        "seconds": 0.0,
    }


def _verify_file(path: str, way: _Way) -> dict[str, Any]:
    import ioshape  # noqa: PLC0415

    def verify(tell: Callable[[Progress], object] | None) -> int:
        ioshape.verify(path, quick=way.quick, progress=tell)
        return Path(path).stat().st_size

    return _outcome(path, verify, way)


def _verify_checkpoint(path: str, way: _Way) -> dict[str, Any]:
    from ioshape._group.dcp_contents import verify  # noqa: PLC0415

    return _outcome(path, lambda tell: verify(path, quick=way.quick, progress=tell), way)


def _verify_group(directory: str, step: int, way: _Way) -> dict[str, Any]:
    from ioshape._core.config import tier_folder  # noqa: PLC0415
    from ioshape._group.checkpoints import nearest  # noqa: PLC0415

    name = os.path.join(directory, f"step-{step:010}")  # noqa: PTH118

    def verify(tell: Callable[[Progress], object] | None) -> int:
        check_directory(directory)
        with nearest(directory, step, "load", tier_folder(None)) as handle:
            checkpoint = handle.describe()
        checkpoint.verify(quick=way.quick, progress=tell)
        return checkpoint.n_bytes

    return _outcome(name, verify, way)


def _checkpoints(
    directory: str, step: int | None, every_one: bool, way: _Way
) -> Iterator[dict[str, Any]]:
    """Yield the results for a directory of checkpoints, or for one checkpoint directory."""
    import ioshape  # noqa: PLC0415

    absolute = Path(directory).absolute()
    match = CHECKPOINT.fullmatch(absolute.name)
    if match:
        yield _verify_group(os.path.dirname(absolute), int(match[1]), way)  # noqa: PTH120
        return
    complete = ioshape.checkpoints(directory)
    if step is not None:
        chosen = [one for one in complete if one.step == step]
    else:
        chosen = complete if every_one else complete[-1:]
    for one in chosen:
        if one.mode == "dcp":
            yield _verify_checkpoint(one.path, way)
        else:
            yield _verify_group(directory, one.step, way)
    if step is not None and not chosen:
        yield _verify_group(directory, step, way)
    if step is not None or (complete and not every_one):
        return
    others = list(damaged(directory, {one.step for one in complete}))
    for path, why in others:
        yield _failed(path, "damaged", why)
    if not complete and not others:
        yield _failed(directory, "unreadable", reason(directory, FileNotFoundError()))


@click.command(short_help="Verify every checksum in files and checkpoints.")
@files_argument
@click.option(
    "--step",
    metavar="N",
    type=click.IntRange(min=0, max=2**64 - 1),
    help="In directories, verify this step instead of the newest.",
)
@click.option("--all", "every_one", is_flag=True, help="In directories, verify every checkpoint.")
@click.option("--quick", is_flag=True, help="Check only the structure; read no data.")
@click.option("-q", "--quiet", is_flag=True, help="Print only problems.")
@json_option
def command(
    files: tuple[str, ...],
    step: int | None,
    every_one: bool,
    quick: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Read files of torch.save or ioshape completely, and compare every checksum in them.

    If a path is a directory of checkpoints, the newest complete one is verified, or the one of
    --step, or with --all every one. A path that ends in step-... is one checkpoint. A directory
    with a .metadata is one checkpoint of torch.distributed.checkpoint. For a file whose name ends
    in .safetensors, the header is checked, and the checksums beside the file, if there are any.

    It prints a line for each file: "ok", or the damaged tensor and its position in the file. On a
    terminal a bar shows the progress.

    Examples:

    \b
    ioshape verify checkpoints/*.pt
    ioshape verify --quiet latest.pt && train --resume latest.pt
    ioshape verify --all checkpoints/

    Exit code: 0 if every file is ok; 1 if one is damaged, cannot be read, or has no checksums.
    """
    if step is not None and every_one:
        raise click.UsageError("give --step N or --all, not both")
    way = _Way(quick, with_bar=not quiet and not as_json and sys.stderr.isatty())

    from ioshape._group.dcp_contents import is_checkpoint  # noqa: PLC0415

    def outcomes() -> Iterator[dict[str, Any]]:
        for path in files:
            if is_checkpoint(path):
                yield _verify_checkpoint(path, way)
            elif Path(path).is_dir():
                yield from _checkpoints(path, step, every_one, way)
            else:
                yield _verify_file(path, way)

    seen = []
    for outcome in outcomes():
        seen.append(outcome)
        if as_json:
            continue
        if outcome["error"]:
            say(outcome["error"])
        elif not quiet:
            state = "structure ok" if quick else "ok"
            say(f"{outcome['path']}: {state}, {human_size(outcome['bytes'])}")
    if as_json:
        say_json(seen)
    return int(any(outcome["error"] for outcome in seen))
