# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape upload": uploads checkpoints to an object store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import (
    SentenceError,
    UsageSentenceError,
    for_json,
    human_seconds,
    human_size,
    json_option,
    plural,
    progress_bar,
    say,
    say_json,
)
from ioshape._cli.paths import endpoint_option, jobs_option, part_option, s3, url_argument

if TYPE_CHECKING:
    from ioshape.s3 import Uploaded


def _sources(source: str, newest: int | None, every_one: bool) -> list[str]:
    """Return the paths to upload, oldest first.

    Args:
        source: the path that the user gave.
        newest: number of newest checkpoints in a directory; None if not given.
        every_one: whether all checkpoints in a directory are uploaded.
    """
    if newest is None and not every_one:
        return [source]
    if newest is not None and every_one:
        raise UsageSentenceError("--newest and --all exclude each other; give one of them")
    import ioshape  # noqa: PLC0415

    found = [one.path for one in ioshape.checkpoints(source)]
    if not found:
        remedy = "give the directory that save_group() writes to, or leave out --newest and --all"
        raise SentenceError(f'there is no checkpoint in "{source}"; {remedy}')
    return found if newest is None else found[-newest:]


def _say(one: Uploaded) -> None:
    sent = human_size(one.sent_bytes) if one.sent_bytes else "nothing"
    say(
        f"{one.url}: {plural(one.files, 'file')}, {human_size(one.n_bytes)}; {sent} sent in "
        f"{human_seconds(one.total_s)}"
    )


@click.command(short_help="Upload a checkpoint to an object store.")
@click.argument("source", metavar="SOURCE", type=click.Path())
@url_argument
@click.option(
    "--newest",
    metavar="N",
    type=click.IntRange(min=1),
    help="Upload the newest N checkpoints of the directory, below the URL.",
)
@click.option(
    "--all",
    "every_one",
    is_flag=True,
    help="Upload all checkpoints of the directory, below the URL.",
)
@jobs_option
@part_option
@endpoint_option
@json_option
def command(
    source: str,
    url: str,
    newest: int | None,
    every_one: bool,
    jobs: int,
    part_bytes: int,
    endpoint: str | None,
    as_json: bool,
) -> int:
    """Upload a checkpoint to s3://BUCKET/KEY.

    SOURCE is a file, a checkpoint of save_group() or torch.distributed.checkpoint, or any other
    directory. Files with checksums are verified while they are read, and the server compares a
    checksum of each part that arrives. The checkpoint becomes visible only when all of it is
    uploaded. If you repeat an interrupted upload, existing objects are not sent again. If the URL
    ends with a slash, the checkpoint keeps its name below it.

    Examples:

    \b
    ioshape upload model.pt s3://bucket/model.pt
    ioshape upload checkpoints/step-0000001000 s3://bucket/run/
    ioshape upload checkpoints s3://bucket/run --newest 2  - the two newest
    ioshape upload checkpoints s3://bucket/run --all --endpoint https://minio:9000

    boto3 finds the credentials: AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws, or the machine's role. The
    command needs that package: pip install 'ioshape[s3]'.

    Exit code: 0; 1 if an upload failed.
    """
    upload = s3().upload
    done = []
    sources = _sources(source, newest, every_one)
    if newest is not None or every_one:
        url = url.removesuffix("/") + "/"
    for path in sources:
        with progress_bar(path, sys.stderr.isatty()) as tell:
            one = upload(
                path, url, jobs=jobs, part_bytes=part_bytes, endpoint=endpoint, progress=tell
            )
        done.append(one)
        if not as_json:
            _say(one)
    if as_json:
        say_json([for_json(one) for one in done])
    return 0
