# SPDX-License-Identifier: Apache-2.0
"""Send files as objects, with the transfer manager of boto3; large files are sent in parts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber
from s3transfer.utils import ChunksizeAdjuster

from ioshape._remote.answers import AnswerError, field
from ioshape._remote.client import WRONG_SUM, code_of, head, sentences
from ioshape._remote.source import Stream
from ioshape._remote.sums import in_base64, md5_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ioshape._remote.address import Address
    from ioshape._remote.client import Client
    from ioshape._remote.source import SourceFile

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


class _Size(BaseSubscriber):  # type: ignore[misc] # boto3 has no types
    """A subscriber that tells the transfer manager the size of a file that it reads as a stream."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def on_queued(self, future: Any, **_: Any) -> None:
        future.meta.provide_transfer_size(self._n_bytes)


class Sender:
    """A sender of files to a bucket, with `jobs` requests at a time and as many parts in memory."""

    def __init__(
        self,
        client: Client,
        jobs: int,
        part_bytes: int,
        tell: Callable[[int], object],
        before_first: Callable[[], object],
    ) -> None:
        """Prepare to send.

        Args:
            client: The client of the object store.
            jobs: The number of requests at a time.
            part_bytes: The size of a part.
            tell: Is called with numbers of bytes that were read or that need not be sent.
            before_first: Is called before anything is written.
        """
        self._client = client
        self._jobs = jobs
        self._part_bytes = part_bytes
        self._tell = tell
        self._before_first = before_first
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

    def send(self, files: Iterable[tuple[SourceFile, Address, int | None]]) -> dict[str, int]:
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
            futures = {pool.submit(self._send, manager, *one): one[0].name for one in files}
            try:
                for future in as_completed(futures):
                    sums[futures[future]] = future.result()
            except BaseException:  # also Ctrl-C
                self._stop.set()
                for future in futures:
                    future.cancel()
                raise
        return sums

    def begin(self) -> None:
        """Prepare the destination. Called before anything is written; only the first call acts."""
        with self._lock:
            if not self._has_begun:
                self._before_first()
            self._has_begun = True

    def put(self, data: bytes, to: Address) -> None:
        """Write a small object."""
        self.begin()
        self._client.put_object(Bucket=to.bucket, Key=to.key, Body=data, ChecksumAlgorithm="CRC32")
        self.sent_bytes += len(data)

    def sum_of(self, file: SourceFile) -> int:
        """Read a file and return its checksum, without sending it."""
        with sentences(f'upload "{file.path}"', file.path, "upload"):
            stream, _etag = self._read(file)
            return stream.crc32

    def _send(
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
            self.begin()
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
