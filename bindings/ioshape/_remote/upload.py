# SPDX-License-Identifier: Apache-2.0
"""Upload checkpoints to an object store: ioshape.s3.upload()."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ioshape._core.config import tier_folder
from ioshape._core.report import Progress
from ioshape._remote.address import Address, destination
from ioshape._remote.answers import length
from ioshape._remote.client import Client, connect, head, sentences, sizes
from ioshape._remote.listing import LISTING, MARKERS, MOST_BYTES, Entry, Kind, Listing, encode
from ioshape._remote.send import LEAST_PART_BYTES, Sender
from ioshape._remote.source import Source, SourceFile, look, refused
from ioshape._remote.sums import crc32, is_same
from ioshape._tier.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: parts that are sent at the same time
JOBS = 8
#: bytes of each part of a large file
PART_BYTES = 16 << 20


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload."""

    #: address of the checkpoint
    url: str
    #: kind of the checkpoint: "file", "group" (of save_group()), "dcp" or "directory"
    kind: Kind
    files: int
    #: total size of all files
    n_bytes: int
    #: bytes that were sent; the others were on the server already
    sent_bytes: int
    total_s: float


def upload(
    source: str | os.PathLike[str],
    url: str,
    *,
    jobs: int = JOBS,
    part_bytes: int = PART_BYTES,
    endpoint: str | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Uploaded:
    """Upload a checkpoint to an object store.

    The source is a file, a checkpoint of save_group() or torch.distributed.checkpoint, or any
    directory.

    Readers see a checkpoint only when it is complete, because its last object is written after all
    others. This is manifest.json for a group checkpoint, .metadata for
    torch.distributed.checkpoint, and a listing for other directories. If an interrupted upload is
    repeated, objects that exist with the same checksum are not sent again. If the upload replaces a
    checkpoint, the old one's last object is removed first.

    With the setting "tier", the copy on the tier is uploaded, unless the checkpoint at the path is
    newer. Data that have checksums are verified while they are read. The server compares a checksum
    of each part that it receives. Only one process at a time may upload to an address.

    Args:
        source: The path of the file or directory.
        url: "s3://bucket/key". If it ends with a slash, the address is "key/NAME", as with cp.
        jobs: The number of parts that are sent at the same time.
        part_bytes: The size of the parts of large files in bytes, at least 5 MiB. Memory holds
            `jobs` parts and a quarter more.
        endpoint: The URL of the server. Default: AWS_ENDPOINT_URL_S3, or Amazon's server.
            Credentials and all other settings come from boto3's variables and files.
        progress: Is called with a Progress at intervals, in several threads. An exception in it
            stops the upload.

    Returns:
        An Uploaded.

    Raises:
        DamagedError: The source is damaged. The destination has no complete checkpoint then.
        StorageError: The source is not a complete checkpoint, or could not be read. Or the server
            cannot be reached or refuses the request.
        ValueError: The URL is invalid, or a number is out of range.
    """
    if jobs < 1 or part_bytes < LEAST_PART_BYTES:
        raise ValueError(
            f"cannot upload with {jobs} jobs and parts of {part_bytes} bytes; give at least 1, and "
            f"{LEAST_PART_BYTES}"
        )
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # A damaged copy on the tier makes nearest() use the destination; failures of the store do
        # not.
        found = nearest(
            os.fspath(source), tier_folder(None), lambda path: stack.enter_context(look(path))
        )
        to = destination(url, os.path.basename(found.path))  # noqa: PTH119
        client = connect(endpoint, jobs)
        done = _Upload(client, found, to, jobs, part_bytes, progress)
        done.run()
    return Uploaded(
        url=str(to),
        kind=found.kind,
        files=len(found.files),
        n_bytes=found.n_bytes,
        sent_bytes=done.sender.sent_bytes,
        total_s=time.perf_counter() - begin,
    )


class _Upload:
    def __init__(
        self,
        client: Client,
        source: Source,
        to: Address,
        jobs: int,
        part_bytes: int,
        progress: Callable[[Progress], object] | None,
    ) -> None:
        self._client = client
        self._source = source
        self._to = to
        self._part_bytes = part_bytes
        self._progress = progress
        self._done_bytes = 0
        self._doing = f'upload "{source.path}" to "{to}"'
        #: size in bytes of each existing object
        self._there: dict[str, int] = {}
        #: checksums of the files that the destination has by now
        self._sums: dict[str, int] = {}
        self.sender = Sender(client, jobs, part_bytes, self._tell, self._hide)

    def _tell(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        if self._progress is not None:
            total = self._source.n_bytes
            self._progress(Progress("upload", min(self._done_bytes, total), total))

    def run(self) -> None:
        """Upload the checkpoint."""
        if self._source.kind == "file":
            self._send_file()
        else:
            self._send_directory()

    def _send_file(self) -> None:
        *beside, file = self._source.files
        for one in beside:  # the file with its checksums
            address = Address(self._to.bucket, self._to.key + one.name.removeprefix(file.name))
            self.sender.send([(one, address, self._size_of(address))])
        self.sender.send([(file, self._to, self._size_of(self._to))])

    def _size_of(self, address: Address) -> int | None:
        with sentences(self._doing, self._source.path, "upload"):
            told = head(self._client, address.bucket, address.key)
        return None if told is None else length(told, "ContentLength")

    # ---- Directories ----------------------------------------------------------------------------

    def _send_directory(self) -> None:
        source = self._source
        with sentences(self._doing, source.path, "upload"):
            self._there = sizes(self._client, self._to.bucket, f"{self._to.key}/")
            if self._is_there():
                self._tell(source.n_bytes)
                return
        last = MARKERS.get(source.kind)
        self._send(file for file in source.files if file.name != last)
        marker = next((file for file in source.files if file.name == last), None)
        if marker is not None:
            self._sums[marker.name] = self.sender.sum_of(marker)
        self._put_listing()
        if marker is not None:
            self._send([marker])

    def _send(self, files: Iterable[SourceFile]) -> None:
        there = self._there.get
        to = ((file, self._to.below(file.name)) for file in files)
        self._sums |= self.sender.send((file, one, there(one.key)) for file, one in to)

    def _put_listing(self) -> None:
        files = (
            Entry(one.name, one.n_bytes, self._sums[one.name], one.modified_ns)
            for one in self._source.files
        )
        listing = Listing(self._source.kind, tuple(files), self._source.directories)
        data = encode(listing)
        if len(data) > MOST_BYTES:
            why = f"the names of its files take more than {MOST_BYTES >> 20} MiB"
            raise refused(self._source.path, why, "shorten them, or pack the files into fewer")
        to = self._to.below(LISTING)
        with sentences(self._doing, self._source.path, "upload"):
            told = head(self._client, to.bucket, to.key) if to.key in self._there else None
            if told is None or not is_same(told, data):
                self.sender.put(data, to)
        self._sums[LISTING] = crc32(data)  # so that _hide() keeps it

    def _is_there(self) -> bool:
        """Return whether the destination has this group checkpoint.

        Only the manifest is read, because it contains all checksums.
        """
        marker = MARKERS["group"]
        if self._source.kind != "group" or self._to.below(LISTING).key not in self._there:
            return False
        if any(
            self._there.get(self._to.below(file.name).key) != file.n_bytes
            for file in self._source.files
        ):
            return False
        manifest = next(file for file in self._source.files if file.name == marker)
        to = self._to.below(marker)
        told = head(self._client, to.bucket, to.key)
        with open(manifest.path, "rb") as file:  # noqa: PTH123 - as in the rest of this file
            data = file.read()
        return told is not None and is_same(told, data)

    def _hide(self) -> None:
        """Remove the last objects of the old checkpoint, before anything is written.

        So the destination has no complete checkpoint until all is replaced.
        """
        for name in {LISTING, *MARKERS.values()} - self._sums.keys():
            key = self._to.below(name).key
            if key in self._there:
                self._client.delete_object(Bucket=self._to.bucket, Key=key)
                del self._there[key]
