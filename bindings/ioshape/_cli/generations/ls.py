# SPDX-License-Identifier: Apache-2.0
"""ioshape ls."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.generations.look import check_directory, damaged, directory_argument, unfinished
from ioshape._cli.objects.shared import endpoint_option
from ioshape._cli.output import Table, columns, human_size, note, say, say_json

if TYPE_CHECKING:
    from ioshape._cli.generations.look import Unfinished
    from ioshape.types import Generation

_STATES = {
    True: "being written",
    False: "left by a dead process",
    None: "unfinished",
}


def _local(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}"


def _state(directory: str, one: Generation) -> str:
    """Where a complete checkpoint is: its path may be written in another way than the directory."""
    above = os.path.dirname(os.path.realpath(one.path))  # noqa: PTH120
    return "complete" if above == os.path.realpath(directory) else "on the tier"


def _as_json(one: Generation | Unfinished, state: str) -> dict[str, Any]:
    """Sizes by the name that all commands have for them, times as text."""
    fields = asdict(one)
    fields["state"] = state
    fields["bytes"] = fields.pop("n_bytes")
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in fields.items()
    }


def _show(directory: str, complete: list[Generation], others: list[Unfinished]) -> None:
    table = Table(*columns(">step", "<saved", "<mode", ">ranks", ">files", ">size", "<state"))
    for one in complete:
        table.add(
            str(one.step),
            _local(one.saved),
            one.mode,
            str(one.ranks),
            str(one.files),
            human_size(one.n_bytes),
            _state(directory, one),
        )
    for other in others:
        size = human_size(other.n_bytes)
        state = _STATES[other.alive]
        table.add(str(other.step), _local(other.touched), "-", "-", "-", size, state)
    table.show()


@click.command(short_help="List the generations in a directory.")
@directory_argument
@endpoint_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(directory: str, endpoint: str | None, as_json: bool) -> int:
    """Lists the generations in a directory that save_group() was given, and the checkpoints of
    torch.distributed.checkpoint whose names end in a number, oldest first.

    That is the order in which they were saved, whatever their steps: the last complete one is the
    newest, from which load_group() goes on.

    What is not complete comes behind them: what is being written, and what was left behind by
    processes that died, which the next save there removes. It is told by a lock, which is not seen
    from every machine: "unfinished" may be either. Sizes and times of those are as of now.

    Of a folder that saves have as their tier it lists what you have there, and what of it waits to
    be drained.

    Of s3://BUCKET/KEY it lists the complete checkpoints that "ioshape upload" has made below that.

    \b
    ioshape ls checkpoints
    ioshape ls /local/nvme
    ioshape ls s3://bucket/run
    ioshape ls --json checkpoints | jq '.generations[-1].step'

    Exit code: 0; 1 if the directory could not be read, or one in it is damaged.
    """
    if directory.startswith("s3:"):
        from ioshape._cli.objects.ls import show  # noqa: PLC0415

        return show(directory, endpoint, as_json)
    import ioshape  # noqa: PLC0415
    from ioshape._tier.tier import is_tier, of_another_user, other_owner  # noqa: PLC0415

    check_directory(directory)
    if (owner := other_owner(directory)) is not None:
        note(f"ioshape: {of_another_user(directory, owner)}")
    elif is_tier(directory):
        from ioshape._cli.tier.ls import show as show_tier  # noqa: PLC0415

        return show_tier(directory, as_json)
    complete = ioshape.generations(directory)
    others = unfinished(directory)
    broken = list(damaged(directory, {one.step for one in complete}))
    if as_json:
        say_json(
            {
                "directory": directory,
                "generations": [_as_json(one, _state(directory, one)) for one in complete],
                "unfinished": [_as_json(one, _STATES[one.alive]) for one in others],
                "damaged": [{"path": path, "error": why} for path, why in broken],
            }
        )
    elif complete or others:
        _show(directory, complete, others)
    elif not broken:
        say(f"There is no generation in {Path(directory).resolve()}.")
    if not as_json:
        for _path, why in broken:
            note(f"ioshape: {why}")
    return 1 if broken else 0
