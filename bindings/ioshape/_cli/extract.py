# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape extract": copies ranks' files out of a group checkpoint."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import human_size, say
from ioshape._cli.paths import check_directory, directory_argument

if TYPE_CHECKING:
    from ioshape._group.checkpoints import Handle, Shard

_PIECE_BYTES = 8 << 20


def _copy(handle: Handle, shard: Shard, path: str, *, replace: bool) -> None:
    """Copy the shard of a rank to a file of its own. The file appears only if it is verified."""
    import ioshape  # noqa: PLC0415
    from ioshape._core.errors import failure  # noqa: PLC0415
    from ioshape._native import lib  # noqa: PLC0415

    piece = memoryview(bytearray(min(_PIECE_BYTES, shard.n_bytes)))
    crc32 = 0
    with (
        handle.reader(shard) as reader,
        ioshape.open(path, "wb", durable=True, replace=replace) as file,
    ):
        for offset in range(0, shard.n_bytes, _PIECE_BYTES):
            view = piece[: shard.n_bytes - offset]
            reader.read_file(offset, view)
            crc32 = zlib.crc32(view, crc32)
            file.write(view)
        if crc32 != shard.crc32:
            raise failure(
                lib.IOSHAPE_E_DAMAGED,
                f'the shard of rank {shard.rank} in "{shard.file}" is damaged: its checksum '
                "differs from the manifest",
                shard.file,
                "extract",
                remedy="use another checkpoint",
                rank=shard.rank,
            )


@click.command(short_help="Copy the data of a rank out of a checkpoint, as a .pt file.")
@directory_argument
@click.option(
    "--rank",
    metavar="K",
    type=click.IntRange(min=0, max=2**32 - 1),
    help="Copy the shard of this rank.",
)
@click.option("--all", "all_ranks", is_flag=True, help="Copy the shards of all ranks.")
@click.option(
    "--step",
    metavar="N",
    type=click.IntRange(min=0, max=2**64 - 1),
    help="Step of the checkpoint.  [default: the newest complete one]",
)
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(),
    help="Output file; with --all the output folder.  [default: rank-00007.pt, or with --all the "
    "current folder]",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
def command(
    directory: str,
    rank: int | None,
    all_ranks: bool,
    step: int | None,
    output: str | None,
    force: bool,
) -> int:
    """Copy the data of one rank, or of all, out of a checkpoint, as ordinary torch.save files.

    Every checksum is compared. A file appears when it is complete and durable.

    \b
    ioshape extract checkpoints --rank 7
    ioshape extract checkpoints --rank 7 --step 1000 -o shard.pt
    ioshape extract checkpoints --all -o shards/

    Exit code: 0; 1 if the checkpoint is damaged or a file could not be written.
    """
    from ioshape._core.config import tier_folder  # noqa: PLC0415
    from ioshape._group.checkpoints import nearest  # noqa: PLC0415

    if (rank is None) == (not all_ranks):
        raise click.UsageError("give either --rank K or --all")
    check_directory(directory)
    with nearest(directory, step, "extract", tier_folder(None)) as handle:
        if rank is not None:
            wanted = [handle.shard(rank)]
        else:
            wanted = [handle.shard(each) for each in range(handle.describe().ranks)]
            if output is not None:
                os.makedirs(output, exist_ok=True)  # noqa: PTH103
        for shard in wanted:
            # Ranks with equal shards share one file in the checkpoint. So the name has the rank.
            name = f"rank-{shard.rank:05}.pt"
            path = output if output is not None and rank is not None else name
            if output is not None and (all_ranks or Path(output).is_dir()):
                path = os.path.join(output, name)  # noqa: PTH118 - as the user wrote it
            _copy(handle, shard, path, replace=force)
            say(f"{path}: rank {shard.rank}, {human_size(shard.n_bytes)}")
    return 0
