# SPDX-License-Identifier: Apache-2.0
"""upload()."""

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

#: sent at the same time
JOBS = 8
#: of large files
PART_BYTES = 16 << 20


@dataclass(frozen=True)
class Uploaded:
    """What an upload did."""

    #: where it is now
    url: str
    #: "file", "generation", "dcp" or "directory"
    kind: Kind
    files: int
    #: of all files
    n_bytes: int
    #: what went over the network; the rest was there already
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
    """Uploads a checkpoint to an object store: a file, a generation of save_group(), a checkpoint
    of torch.distributed.checkpoint, or any directory.

    It is a checkpoint there only when all of it is: a generation's manifest.json, a checkpoint's
    .metadata, or a listing of other directories is written last. If it is called again after it was
    interrupted, objects that are there already, with the same checksum, are not sent again. A
    checkpoint that is replaced loses its last object first.

    With the setting "tier" the copy there is uploaded, unless there is a newer one at the path.
    What has checksums is verified while it is read. The server compares a checksum of each part
    that arrives there. Only one process at a time may upload to one address.

    Args:
        source: path of the file or directory.
        url: "s3://bucket/key"; if it ends with a slash, "key/NAME", as cp has it.
        jobs: parts that are sent at the same time.
        part_bytes: of large files, at least 5 MiB; `jobs` of them and a quarter more are in memory.
        endpoint: URL of the server; default: that of AWS_ENDPOINT_URL_S3, or Amazon's. Credentials
            and everything else come from boto3's variables and files.
        progress: is called with a Progress now and then, from several threads; an exception in it
            stops the upload.

    Raises:
        DamagedError: the source is damaged. What is there is no checkpoint.
        StorageError: the source is no complete checkpoint, or could not be read, or the server
            cannot be reached, or refuses it.
        ValueError: the URL is none, or a number is out of range.
    """
    if jobs < 1 or part_bytes < LEAST_PART_BYTES:
        raise ValueError(
            f"cannot upload with {jobs} jobs and parts of {part_bytes} bytes; give at least 1, and "
            f"{LEAST_PART_BYTES}"
        )
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # Only what is wrong with the copy leads to the destination, and nothing of the store's.
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
        #: bytes of each object that is there
        self._there: dict[str, int] = {}
        #: of the files of a directory that are there by now
        self._sums: dict[str, int] = {}
        self.sender = Sender(client, jobs, part_bytes, self._tell, self._hide)

    def _tell(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        if self._progress is not None:
            total = self._source.n_bytes
            self._progress(Progress("upload", min(self._done_bytes, total), total))

    def run(self) -> None:
        """Uploads all of it."""
        if self._source.kind == "file":
            self._send_file()
        else:
            self._send_directory()

    def _send_file(self) -> None:
        *beside, file = self._source.files
        for one in beside:  # its checksums
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
        self._sums[LISTING] = crc32(data)  # what comes after it does not hide it

    def _is_there(self) -> bool:
        """Whether it is this generation, without reading it: the manifest has all checksums."""
        marker = MARKERS["generation"]
        if self._source.kind != "generation" or self._to.below(LISTING).key not in self._there:
            return False
        if any(
            self._there.get(self._to.below(file.name).key) != file.n_bytes
            for file in self._source.files
        ):
            return False
        manifest = next(file for file in self._source.files if file.name == marker)
        to = self._to.below(marker)
        told = head(self._client, to.bucket, to.key)
        with open(manifest.path, "rb") as file:  # noqa: PTH123 - as everywhere here
            data = file.read()
        return told is not None and is_same(told, data)

    def _hide(self) -> None:
        """Before anything is written: what is there is no checkpoint until all is replaced."""
        for name in {LISTING, *MARKERS.values()} - self._sums.keys():
            key = self._to.below(name).key
            if key in self._there:
                self._client.delete_object(Bucket=self._to.bucket, Key=key)
                del self._there[key]
