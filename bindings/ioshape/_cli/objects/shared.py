# SPDX-License-Identifier: Apache-2.0
"""What commands about object stores have in common."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from ioshape._cli.output import SentenceError, size_option

#: URL: of a checkpoint, or of what it goes below
url_argument = click.argument("url", metavar="URL")

endpoint_option = click.option(
    "--endpoint",
    metavar="URL",
    help="Of the server. Default: AWS_ENDPOINT_URL_S3, or Amazon's.",
)

jobs_option = click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Parts that are under way at the same time.",
)

part_option = click.option(
    "--part-bytes",
    metavar="BYTES",
    default="16M",
    show_default=True,
    callback=size_option,
    help="Of a part of a large file. Each job takes that much memory.",
)


def s3() -> Any:
    """The module ioshape.s3."""
    try:
        return import_module("ioshape.s3")
    except ImportError as error:
        raise SentenceError(str(error)) from None
