# SPDX-License-Identifier: Apache-2.0
"""Upload checkpoints to an object store: ioshape.s3.upload()."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber
from s3transfer.utils import ChunksizeAdjuster

from ioshape._core.config import tier_folder
from ioshape._core.report import Progress
from ioshape._remote.client import (
    WRONG_SUM,
    AnswerError,
    Client,
    code_of,
    connect,
    field,
    head,
    length,
    sentences,
    sizes,
)
from ioshape._remote.listing import (
    LISTING,
    MARKERS,
    MOST_BYTES,
    Address,
    Entry,
    Kind,
    Listing,
    destination,
    encode,
)
from ioshape._remote.source import Source, SourceFile, Stream, look, refused
from ioshape._remote.sums import crc32, in_base64, is_same, md5_of
from ioshape._tier.drain import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


#: parts that are sent at the same time
JOBS = 8
#: bytes of each part of a large file
PART_BYTES = 16 << 20
#: bytes of a part at least, except the last: S3's limit
LEAST_PART_BYTES = 5 << 20
# incomplete uploads of one object that are looked at, at most
_MOST_UPLOADS = 10_000
# attempts to send an object that was damaged in transit
_ATTEMPTS = 3

#: key in an object's metadata: when the file was last modified, in nanoseconds since 1970
MODIFIED = "ioshape-modified-ns"

#: FULL_OBJECT: the checksum of the object is that of the file, however it is cut into parts.
_SUMS = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}


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
            `jobs` parts, a quarter more, and one that is being read. boto3 takes 150 MiB, too.
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
        sent_bytes=done.sent_bytes,
        total_s=time.perf_counter() - begin,
    )


class _Size(BaseSubscriber):  # type: ignore[misc] # boto3 has no types
    """A subscriber that tells the transfer manager the size of a file that it reads as a stream."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def on_queued(self, future: Any, **_: Any) -> None:
        future.meta.provide_transfer_size(self._n_bytes)


class _Upload:
    """An upload with `jobs` requests at a time and as many parts in memory."""

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
        self._jobs = jobs
        self._part_bytes = part_bytes
        self._progress = progress
        self._done_bytes = 0
        self._doing = f'upload "{source.path}" to "{to}"'
        #: size in bytes of each existing object
        self._there: dict[str, int] = {}
        #: checksums of the files that the destination has by now
        self._sums: dict[str, int] = {}
        self._lock = threading.Lock()
        self._has_begun = False
        self._stop = threading.Event()
        self._config = TransferConfig(
            multipart_threshold=part_bytes + 1,
            multipart_chunksize=part_bytes,
            max_request_concurrency=jobs,
            # Each of these threads holds one more part.
            max_submission_concurrency=max(1, jobs // 4),
            max_in_memory_upload_chunks=jobs,
        )
        self.sent_bytes = 0

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
            self._send([(one, address, self._size_of(address))])
        self._send([(file, self._to, self._size_of(self._to))])

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
        self._send_below(file for file in source.files if file.name != last)
        marker = next((file for file in source.files if file.name == last), None)
        if marker is not None:
            self._sums[marker.name] = self._sum_of(marker)
        self._put_listing()
        if marker is not None:
            self._send_below([marker])

    def _send_below(self, files: Iterable[SourceFile]) -> None:
        there = self._there.get
        to = ((file, self._to.below(file.name)) for file in files)
        self._sums |= self._send((file, one, there(one.key)) for file, one in to)

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
                self._begin()
                self._client.put_object(
                    Bucket=to.bucket, Key=to.key, Body=data, ChecksumAlgorithm="CRC32"
                )
                self.sent_bytes += len(data)
        self._sums[LISTING] = crc32(data)  # so that _begin() keeps it

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

    def _begin(self) -> None:
        """Remove the last objects of the old checkpoint. Called before anything is written.

        So the destination has no complete checkpoint until all is replaced. Only the first call
        acts.
        """
        with self._lock:
            if self._has_begun:
                return
            for name in {LISTING, *MARKERS.values()} - self._sums.keys():
                key = self._to.below(name).key
                if key in self._there:
                    self._client.delete_object(Bucket=self._to.bucket, Key=key)
                    del self._there[key]
            self._has_begun = True

    # ---- Files ----------------------------------------------------------------------------------

    def _send(self, files: Iterable[tuple[SourceFile, Address, int | None]]) -> dict[str, int]:
        """Send files to their addresses, unless they are there already.

        The first failure stops all.

        Args:
            files: The files, each with its address and the size of the object there, if any.

        Returns:
            The checksums of the files, by name.

        Raises:
            StorageError: A file is damaged, or could not be read or sent.
        """
        sums: dict[str, int] = {}
        with (
            ThreadPoolExecutor(self._jobs, thread_name_prefix="ioshape-s3") as pool,
            TransferManager(self._client, self._config) as manager,
        ):
            futures = {pool.submit(self._send_one, manager, *one): one[0].name for one in files}
            try:
                for future in as_completed(futures):
                    sums[futures[future]] = future.result()
            except BaseException:  # also Ctrl-C
                self._stop.set()
                for future in futures:
                    future.cancel()
                raise
        return sums

    def _sum_of(self, file: SourceFile) -> int:
        """Read a file and return its checksum, without sending it."""
        with sentences(f'upload "{file.path}"', file.path, "upload"):
            stream, _etag = self._read(file)
            return stream.crc32

    def _send_one(
        self, manager: TransferManager, file: SourceFile, to: Address, there: int | None
    ) -> int:
        with sentences(f'upload "{file.path}" to "{to}"', file.path, "upload"):
            if file.n_bytes > self._part_bytes:
                self._abort_others(to)
            told = head(self._client, to.bucket, to.key) if there == file.n_bytes else None
            if told is not None and _may_be(told, file):
                stream, etag = self._read(file)
                if _is_told(told, stream, etag):
                    self._tell(file.n_bytes)
                    return stream.crc32
            self._begin()
            for _ in range(_ATTEMPTS - 1):
                try:
                    return self._send_once(manager, file, to)
                except ClientError as error:
                    if code_of(error) not in WRONG_SUM:
                        raise
            return self._send_once(manager, file, to)

    def _send_once(self, manager: TransferManager, file: SourceFile, to: Address) -> int:
        extra = {"Metadata": {MODIFIED: str(file.modified_ns)}, **_SUMS}
        with Stream(file, self._stop.is_set, self._tell) as stream:
            future = manager.upload(stream, to.bucket, to.key, extra, [_Size(file.n_bytes)])
            stream.stopped = future.done  # also stops if another part has failed
            try:
                future.result()
            except KeyError as error:
                raise AnswerError(f"the server's answer lacks {error}") from error
        with self._lock:
            self.sent_bytes += file.n_bytes
        return stream.crc32

    def _read(self, file: SourceFile) -> tuple[Stream, str]:
        """Read a whole file; also return the ETag that a server makes of MD5s of its parts."""
        part_bytes = ChunksizeAdjuster().adjust_chunksize(self._part_bytes, file.n_bytes)
        md5s: list[bytes] = []
        with Stream(file, self._stop.is_set) as stream:
            while (data := stream.read(part_bytes)) or not md5s:
                md5s.append(md5_of(data))
        if file.n_bytes <= self._part_bytes:
            return stream, md5s[0].hex()
        return stream, f"{md5_of(b''.join(md5s)).hex()}-{len(md5s)}"

    def _abort_others(self, to: Address) -> None:
        """Remove the parts that killed uploads of an object have left, which are charged for."""
        for one in _uploads(self._client, to):
            try:
                self._client.abort_multipart_upload(
                    Bucket=to.bucket, Key=to.key, UploadId=one["UploadId"]
                )
            except ClientError as error:
                if code_of(error) not in ("NoSuchUpload", "404"):
                    raise


def _may_be(told: Mapping[str, Any], file: SourceFile) -> bool:
    """Return whether an object of equal length may hold this file, which is then read."""
    return told.get("Metadata", {}).get(MODIFIED) in (None, str(file.modified_ns))


def _is_told(told: Mapping[str, Any], stream: Stream, etag: str) -> bool:
    """Return whether the server's object has the bytes of this file."""
    crc32 = str(told.get("ChecksumCRC32") or "")
    if crc32 and "-" not in crc32:  # a hyphen marks a checksum of checksums
        return crc32 == in_base64(stream.crc32)
    return str(told.get("ETag", "")).strip('"') == etag


def _uploads(client: Client, to: Address) -> list[Mapping[str, Any]]:
    """Return the incomplete uploads of this object."""
    found: list[Mapping[str, Any]] = []
    try:
        for page in client.pages("list_multipart_uploads", Bucket=to.bucket, Prefix=to.key):
            for one in page.get("Uploads", ()):
                field(one, "UploadId", str)
                if field(one, "Key", str) == to.key:
                    found.append(one)
            if len(found) > _MOST_UPLOADS:
                remedy = "give the bucket a lifecycle rule that removes them"
                raise AnswerError("too many uploads of it are incomplete", remedy=remedy)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":  # rclone's server says so if there are none at all
            raise
    return found
