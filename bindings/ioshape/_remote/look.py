# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoints on an object store."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ioshape._core.errors import failure
from ioshape._remote.address import Address, destination, parse
from ioshape._remote.answers import AnswerError, field, length
from ioshape._remote.client import connect, head, sentences
from ioshape._remote.listing import LISTING, MARKERS, MOST_BYTES, MOST_NAMES, Kind, Listing, decode
from ioshape._remote.send import MODIFIED
from ioshape._remote.source import look

if TYPE_CHECKING:
    from ioshape._remote.client import Client
    from ioshape._remote.source import Source


@dataclass(frozen=True)
class Remote:
    """A complete checkpoint on an object store."""

    url: str
    #: kind of the checkpoint: "group" (of save_group()), "dcp" or "directory"
    kind: Kind
    #: time at which its last object was written, in UTC
    uploaded: datetime
    files: int
    #: total size of all files
    n_bytes: int


def read_listing(client: Client, address: Address, operation: str) -> Listing:
    """Return the listing of a directory on the object store.

    Raises:
        StorageError: The object is not a valid listing.
    """
    to = address.below(LISTING)
    data = client.get_object(Bucket=to.bucket, Key=to.key)["Body"].read(MOST_BYTES + 1)
    try:
        if len(data) > MOST_BYTES:
            raise ValueError("it is too large")
        return decode(data)
    except ValueError as error:
        sentence = f'cannot {operation} "{address}": "{to}" is damaged: {error}'
        remedy = "upload the checkpoint again, or use another one"
        raise failure(-errno.EBADMSG, sentence, str(to), operation, remedy=remedy) from None


def is_uploaded(path: str, url: str, *, endpoint: str | None = None) -> bool:
    """Return whether upload() has uploaded a checkpoint, judged by names, lengths and times.

    No file is read.

    Raises:
        StorageError: The path is not a checkpoint, or the server cannot be reached.
    """
    with look(path) as source:
        address = destination(url, os.path.basename(source.path))  # noqa: PTH119
        client = connect(endpoint, 1)
        with sentences(f'upload "{path}" to "{address}"', path, "upload"):
            if source.kind != "file":
                return _has_all(client, source, address)
            told = head(client, address.bucket, address.key)
    file = source.files[-1]
    return (
        told is not None
        and length(told, "ContentLength") == file.n_bytes
        and told.get("Metadata", {}).get(MODIFIED) == str(file.modified_ns)
    )


def _has_all(client: Client, source: Source, address: Address) -> bool:
    last = address.below(MARKERS.get(source.kind, LISTING))
    to = address.below(LISTING)
    if any(head(client, one.bucket, one.key) is None for one in {last, to}):
        return False
    listing = read_listing(client, address, "upload")
    there = {(one.name, one.bytes, one.modified_ns) for one in listing.files}
    return there == {(one.name, one.n_bytes, one.modified_ns) for one in source.files}


def checkpoints(url: str, *, endpoint: str | None = None) -> list[Remote]:
    """Return the complete checkpoints that upload() has made below an address.

    They are sorted by the time of their completion. Files that were uploaded on their own are not
    included.

    Args:
        url: "s3://bucket/key", or "s3://bucket" for the whole bucket.
        endpoint: The URL of the server, as in upload().

    Returns:
        A list of Remote objects.

    Raises:
        StorageError: The server cannot be reached, or refuses the request, or a listing is damaged.
        ValueError: The URL is invalid.
    """
    above, _ = parse(url)
    client = connect(endpoint, 1)
    prefix = f"{above.key}/" if above.key else ""
    found: list[Remote] = []
    written: dict[str, datetime] = {}
    with sentences(f'list "{url}"', url, "list"):
        names = (LISTING, *MARKERS.values())
        for page in client.pages("list_objects_v2", Bucket=above.bucket, Prefix=prefix):
            for one in page.get("Contents", ()):
                key = field(one, "Key", str)
                if key.rpartition("/")[2] in names:
                    written[key] = field(one, "LastModified", datetime)
            if len(written) > MOST_NAMES:
                remedy = "give the address of fewer of them"
                raise AnswerError("there are too many checkpoints", remedy=remedy)
        for key in written:
            folder, _, name = key.rpartition("/")
            if name != LISTING:
                continue
            address = Address(above.bucket, folder)
            listing = read_listing(client, address, "list")
            saved = written.get(address.below(listing.last).key)
            if saved is not None:
                files = len(listing.files)
                found.append(Remote(str(address), listing.kind, saved, files, listing.n_bytes))
    return sorted(found, key=lambda one: one.uploaded)
