# SPDX-License-Identifier: Apache-2.0
"""One file becomes one object: at once, or in parts that several threads send."""

from __future__ import annotations

import threading
from base64 import b64encode
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import datetime
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from ioshape._errors import StorageError
from ioshape._log import logger
from ioshape._remote.answers import AnswerError, field
from ioshape._remote.client import WRONG_SUM, code_of, head, sentences
from ioshape._remote.source import OpenFile, Part
from ioshape._remote.sums import in_base64, is_etag, is_same, md5_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ioshape._remote.address import Address
    from ioshape._remote.client import Client, Response
    from ioshape._remote.source import SourceFile
    from ioshape._remote.sums import Sums

#: S3 takes no more of an object
MOST_PARTS = 10_000
#: and none smaller, but for the last
LEAST_PART_BYTES = 5 << 20
_UNIT = 1 << 20
# Uploads of one object that were begun and not completed.
_MOST_UPLOADS = 10_000
# Of what was damaged on its way.
_ATTEMPTS = 3

#: in an object's metadata: when the file was last modified, in nanoseconds since 1970
MODIFIED = "ioshape-modified-ns"

# What a server says of parts that somebody else has sent, or taken away.
_NOT_OURS = ("NoSuchUpload", "InvalidPart", "InvalidPartOrder", "InvalidRequest", "404")

_log = logger()


class Stopped(Exception):
    """Another thread has failed."""


class Sender:
    """Sends files to a bucket, with `jobs` threads and as many parts in memory."""

    def __init__(
        self,
        client: Client,
        jobs: int,
        part_bytes: int,
        tell: Callable[[int], object],
        before_first: Callable[[], object],
    ) -> None:
        """`tell` hears of bytes that are there, `before_first` is called before anything is
        written."""
        self._client = client
        self._jobs = jobs
        self._part_bytes = part_bytes
        self._tell = tell
        self._before_first = before_first
        self._lock = threading.Lock()
        self._has_begun = False
        self._stop = threading.Event()
        self._buffers = threading.local()
        #: whether the server checks CRC-32s; if not, it is given MD5s, which all of them check
        self.checks_crc32 = True
        self._etags_are_md5s = True
        self.sent_bytes = 0

    # ---- Threads --------------------------------------------------------------------------------

    def each(self, files: Iterable[SourceFile], send: Callable[[SourceFile], None]) -> None:
        """Calls it for all of them, several at a time. The first failure stops all."""
        left = iter(files)

        def work() -> None:
            while True:
                with self._lock:
                    file = next(left, None)
                if file is None:
                    return
                self._check_stop()
                send(file)

        self._together(work)

    def _together(self, work: Callable[[], None]) -> None:
        self._stop.clear()
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="ioshape-s3") as pool:
            futures = [pool.submit(self._stopping, work) for _ in range(self._jobs)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:  # Ctrl-C
                self._stop.set()
                raise
        failures = [one.exception() for one in futures]
        real = [one for one in failures if one is not None and not isinstance(one, Stopped)]
        if real:
            raise real[0]

    def _stopping(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self._stop.set()
            raise

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _buffer(self) -> bytearray:
        """Of this thread, and used again and again."""
        if not hasattr(self._buffers, "data"):
            self._buffers.data = bytearray(self._part_bytes)
        found: bytearray = self._buffers.data
        return found

    # ---- Writing --------------------------------------------------------------------------------

    def begin(self) -> None:
        """To be called before anything is written."""
        with self._lock:
            if not self._has_begun:
                self._before_first()
            self._has_begun = True

    def _checked(
        self,
        call: Callable[..., Response],
        data: bytearray | bytes,
        crc32: int,
        **arguments: Any,
    ) -> Response:
        """Sends bytes with a checksum that the server compares. What was damaged goes once more."""
        for attempt in range(1, _ATTEMPTS + 1):
            self._check_stop()
            try:
                if self.checks_crc32:
                    sum_ = {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": in_base64(crc32)}
                    response = call(Body=data, **sum_, **arguments)
                    if response.get("ChecksumCRC32") == sum_["ChecksumCRC32"]:
                        break
                    self.fall_back()
                response = self._with_md5(call, data, **arguments)
                break
            except ClientError as error:
                if code_of(error) not in WRONG_SUM or attempt == _ATTEMPTS:
                    raise
        with self._lock:
            self.sent_bytes += len(data)
        return response

    def _with_md5(
        self, call: Callable[..., Response], data: bytearray | bytes, **arguments: Any
    ) -> Response:
        """A part's ETag is the MD5 of what arrived, on most servers: that spares them another one.
        Nobody sees a part that was damaged on its way, and it is sent again.
        """
        md5 = md5_of(data)
        if self._etags_are_md5s and "PartNumber" in arguments:
            response = call(Body=data, **arguments)
            if is_etag(response, md5):
                return response
        response = call(Body=data, ContentMD5=b64encode(md5).decode(), **arguments)
        self._etags_are_md5s = is_etag(response, md5)
        return response

    def fall_back(self) -> None:
        """To what every server checks."""
        with self._lock:
            was, self.checks_crc32 = self.checks_crc32, False
        if was:
            _log.warning(
                "the object store does not check CRC-32s; it is given MD5s, which take more time"
            )

    def put(
        self, data: bytearray | bytes, to: Address, crc32: int, metadata: Mapping[str, str]
    ) -> None:
        """A small object, at once."""
        self.begin()
        place = {"Bucket": to.bucket, "Key": to.key, "Metadata": metadata}
        self._checked(self._client.put_object, data, crc32, **place)

    def send(self, file: SourceFile, to: Address, there: int | None) -> int:
        """A file, unless it is there already, as `there` many bytes. Its checksum.

        Raises:
            StorageError: the file is damaged, or could not be read or sent.
        """
        doing = f'upload "{file.path}" to "{to}"'
        with sentences(doing, file.path, "upload"):
            if file.n_bytes <= self._part_bytes:
                return self._send_small(file, to, there)
            told = head(self._client, to.bucket, to.key) if there == file.n_bytes else None
            if told is not None and _may_be(told, file):
                sums = self._read_only(file, with_md5s="ChecksumCRC32" not in told)
                if sums.is_told(told):
                    self._abort_all(_uploads(self._client, to), to)
                    self._tell(file.n_bytes)
                    return sums.whole()
            try:
                return self._send_large(file, to)
            except ClientError as error:
                if code_of(error) not in _NOT_OURS:
                    raise
                return self._send_large(file, to, afresh=True)

    def _send_small(self, file: SourceFile, to: Address, there: int | None) -> int:
        with OpenFile(file, self._part_bytes) as source:
            part = source.read(self._buffer()) or Part(0, bytearray(), 0)
            source.check()
        told = head(self._client, to.bucket, to.key) if there == file.n_bytes else None
        if told is None or not is_same(told, part.data, part.crc32):
            self.put(part.data, to, part.crc32, {MODIFIED: str(file.modified_ns)})
        self._tell(file.n_bytes)
        return part.crc32

    def sums_of(self, file: SourceFile) -> Sums:
        """Of a file that is read, and not sent."""
        with sentences(f'upload "{file.path}"', file.path, "upload"):
            return self._read_only(file)

    def _read_only(self, file: SourceFile, *, with_md5s: bool = False) -> Sums:
        with OpenFile(file, self.part_bytes_of(file), with_md5s=with_md5s) as source:

            def work() -> None:
                buffer = bytearray(self.part_bytes_of(file))
                while source.read(buffer) is not None:
                    self._check_stop()

            self._together(work)
            source.check()
            return source.sums

    # ---- In parts -------------------------------------------------------------------------------

    def part_bytes_of(self, file: SourceFile) -> int:
        """The same each time, or nothing could be continued."""
        least = -(-file.n_bytes // MOST_PARTS)
        return max(self._part_bytes, -(-least // _UNIT) * _UNIT)

    def _send_large(self, file: SourceFile, to: Address, *, afresh: bool = False) -> int:
        self.begin()
        part_bytes = self.part_bytes_of(file)
        place = {"Bucket": to.bucket, "Key": to.key}
        others = _uploads(self._client, to)
        upload, there = None, {}
        for one in () if afresh else others:
            there = self._parts_of(one, place)
            if self._can_continue(there, file.n_bytes, part_bytes):
                upload = one["UploadId"]
                break
        # Before it is complete: whoever finds it complete sends nothing, and looks for nothing.
        self._abort_all((one for one in others if one["UploadId"] != upload), to)
        if upload is None:
            upload, there = self._begin_upload(file, place), {}
        place["UploadId"] = upload
        parts: dict[int, dict[str, Any]] = {}
        with OpenFile(file, part_bytes) as source:

            def work() -> None:
                buffer = bytearray(part_bytes)
                while (part := source.read(buffer)) is not None:
                    self._check_stop()
                    number = part.offset // part_bytes + 1
                    told = there.get(number)
                    if told is None or not is_same(told, part.data, part.crc32):
                        where = {"PartNumber": number, **place}
                        told = self._checked(
                            self._client.upload_part, part.data, part.crc32, **where
                        )
                    parts[number] = self._in_list(number, told, part.crc32)
                    self._tell(len(part.data))

            try:
                self._together(work)
                source.check()
            except StorageError:  # it is damaged: nobody will go on with it
                self._abort(place)
                raise
            self._complete(place, parts, source.sums, file.n_bytes)
        return source.sums.whole()

    def _begin_upload(self, file: SourceFile, place: Mapping[str, str]) -> str:
        metadata = {MODIFIED: str(file.modified_ns)}
        if self.checks_crc32:
            # FULL_OBJECT: the object's checksum is that of the file, whatever its parts are.
            sums = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
            begun = self._client.create_multipart_upload(Metadata=metadata, **sums, **place)
            if begun.get("ChecksumAlgorithm") == "CRC32":
                return field(begun, "UploadId", str)
            self._abort({**place, "UploadId": field(begun, "UploadId", str)})
            self.fall_back()
        begun = self._client.create_multipart_upload(Metadata=metadata, **place)
        return field(begun, "UploadId", str)

    def _parts_of(self, upload: Mapping[str, Any], place: Mapping[str, str]) -> dict[int, Any]:
        """What is there of an upload that somebody has begun."""
        found: dict[int, Any] = {}
        algorithm = upload.get("ChecksumAlgorithm")
        try:
            for page in self._client.pages("list_parts", **place, UploadId=upload["UploadId"]):
                algorithm = algorithm or page.get("ChecksumAlgorithm")
                found |= {field(one, "PartNumber", int): one for one in page.get("Parts", ())}
                if len(found) > MOST_PARTS:
                    raise AnswerError("the server knows more parts than an object has")
        except ClientError as error:
            if code_of(error) not in _NOT_OURS:
                raise
        if found and not algorithm:
            self.fall_back()  # as when it was begun
        return found if algorithm in (None, "CRC32") else {}

    @staticmethod
    def _can_continue(there: Mapping[int, Any], n_bytes: int, part_bytes: int) -> bool:
        return bool(there) and all(
            one.get("Size") == min(part_bytes, n_bytes - (number - 1) * part_bytes)
            for number, one in there.items()
        )

    def _in_list(self, number: int, told: Mapping[str, Any], crc32: int) -> dict[str, Any]:
        """A part, as the server wants to hear of it in the end."""
        part = {"PartNumber": number, "ETag": field(told, "ETag", str)}
        return {**part, "ChecksumCRC32": in_base64(crc32)} if self.checks_crc32 else part

    def _complete(
        self, place: Mapping[str, str], parts: Mapping[int, Any], sums: Sums, n_bytes: int
    ) -> None:
        """Now it is there. The server compares what it has with what we have read."""
        whole = {
            "ChecksumCRC32": in_base64(sums.whole()),
            "ChecksumType": "FULL_OBJECT",
            "MpuObjectSize": n_bytes,
        }
        self._check_stop()
        self._client.complete_multipart_upload(
            MultipartUpload={"Parts": [parts[number] for number in sorted(parts)]},
            **(whole if self.checks_crc32 else {}),
            **place,
        )

    def _abort_all(self, uploads: Iterable[Mapping[str, Any]], to: Address) -> None:
        for one in uploads:
            self._abort({"Bucket": to.bucket, "Key": to.key, "UploadId": one["UploadId"]})

    def _abort(self, place: Mapping[str, str]) -> None:
        """Its parts are paid for until then."""
        try:
            self._client.abort_multipart_upload(**place)
        except ClientError as error:
            if code_of(error) not in _NOT_OURS:
                raise


def _may_be(told: Mapping[str, Any], file: SourceFile) -> bool:
    """Whether it is worth reading the file to compare it with an object as long as it is."""
    return told.get("Metadata", {}).get(MODIFIED) in (None, str(file.modified_ns))


def _uploads(client: Client, to: Address) -> list[Mapping[str, Any]]:
    """Those of this object that are not complete, the newest first."""
    found: list[Mapping[str, Any]] = []
    try:
        for page in client.pages("list_multipart_uploads", Bucket=to.bucket, Prefix=to.key):
            for one in page.get("Uploads", ()):
                field(one, "UploadId", str), field(one, "Initiated", datetime)
                if field(one, "Key", str) == to.key:
                    found.append(one)
            if len(found) > _MOST_UPLOADS:
                remedy = "give the bucket a lifecycle rule that removes them"
                raise AnswerError("too many uploads of it are incomplete", remedy=remedy)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":  # rclone's server says that there are none at all
            raise
    return sorted(found, key=lambda one: one["Initiated"], reverse=True)
