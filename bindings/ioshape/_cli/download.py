# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape download": downloads a checkpoint from an object store."""

from __future__ import annotations

import sys

import click

from ioshape._cli.output import human_size, plural, progress_bar, remark, say
from ioshape._cli.paths import endpoint_option, jobs_option, part_option, s3, url_argument


@click.command(short_help="Download an uploaded checkpoint.")
@url_argument
@click.argument("path", metavar="PATH", type=click.Path())
@jobs_option
@part_option
@endpoint_option
def command(url: str, path: str, jobs: int, part_bytes: int, endpoint: str | None) -> int:
    """Download and verify a checkpoint that "ioshape upload" has uploaded. It appears atomically.

    If PATH is a directory or ends with a slash, the checkpoint keeps its name and goes into that
    directory. An existing file is replaced; an existing checkpoint directory is not.

    \b
    ioshape download s3://bucket/run/model.pt model.pt
    ioshape download s3://bucket/run/step-0000001000 checkpoints/

    Exit code: 0; 1 if there is no complete checkpoint, or the download failed.
    """
    download = s3().download
    with progress_bar(url, sys.stderr.isatty()) as tell:
        done = download(
            url, path, jobs=jobs, part_bytes=part_bytes, endpoint=endpoint, progress=tell
        )
    say(f"{done.path}: {plural(done.files, 'file')}, {human_size(done.n_bytes)}")
    if not done.verified:
        remark(
            "ioshape: the server has no checksum of this checkpoint, so the download was not "
            f'verified; run "ioshape verify {done.path}"'
        )
    return 0
