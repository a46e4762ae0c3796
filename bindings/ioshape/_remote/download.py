# SPDX-License-Identifier: Apache-2.0
"""Find and download checkpoints of an object store: ioshape.s3.checkpoints() and download()."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import ClientError

from ioshape._core.config import is_durable
from ioshape._core.errors import failure
from ioshape._core.report import Progress
from ioshape._files.directory import sync_tree
from ioshape._files.open import open as open_file
from ioshape._load.contents import BESIDE
from ioshape._native import lib
from ioshape._remote.client import (
    BROKEN,
    AnswerError,
    Client,
    code_of,
    connect,
    field,
    head,
    length,
    sentences,
)
from ioshape._remote.listing import (
    LISTING,
    MARKERS,
    MOST_BYTES,
    MOST_NAMES,
    Address,
    Entry,
    Kind,
    Listing,
    decode,
    destination,
    parse,
)
from ioshape._remote.source import look
from ioshape._remote.sums import Sums, in_base64
from ioshape._remote.upload import JOBS, MODIFIED, PART_BYTES
from ioshape._save.atomic import Directory, sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ioshape._core.errors import StorageError
    from ioshape._remote.source import Source


# Nanoseconds since 1970, up to the year 2262, which fit into 63 bits.
_NANOSECONDS = re.compile(r"[0-9]{1,18}|[1-8][0-9]{18}")
# attempts to read a part whose transfer breaks off
_ATTEMPTS = 5


@dataclass(frozen=True)
class Downloaded:
    """The result of a download."""

    #: path of the file or directory
    path: str
    #: kind of the checkpoint: "file", "group" (of save_group()), "dcp" or "directory"
    kind: Kind
    files: int
    #: total size of all files
    n_bytes: int
    #: whether all bytes were compared with checksums; False for a file whose checksum the server
    #: does not know
    verified: bool


def download(
    url: str,
    path: str | os.PathLike[str],
    *,
    durable: bool | None = None,
    jobs: int = JOBS,
    part_bytes: int = PART_BYTES,
    endpoint: str | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Downloaded:
    """Download a checkpoint that upload() has uploaded. It appears as a whole, and verified.

    Args:
        url: The address of the checkpoint: "s3://bucket/key".
        path: The path of the file, which is replaced, or of the directory, which must not exist. If
            the path is an existing directory or ends with a slash, the checkpoint goes into it, as
            with cp.
        durable: Whether to wait for stable storage, as in save().
        jobs: The number of parts that are fetched at the same time.
        part_bytes: The size of a part in bytes; each job needs that much memory.
        endpoint: The URL of the server, as in upload().
        progress: Is called with a Progress, as in upload().

    Returns:
        A Downloaded.

    Raises:
        DamagedError: The received bytes have another checksum or length than the uploaded ones.
        StorageError: There is no complete checkpoint, or it could not be written. Or the server
            cannot be reached or refuses the request.
        ValueError: The URL is invalid, or a number is out of range.
    """
    if jobs < 1 or part_bytes < 1:
        raise ValueError("cannot download with fewer than one job, or parts of less than one byte")
    address, _ = parse(url)
    if not address.key:
        raise ValueError(f'"{url}" is a bucket; give an address in it, as "ioshape ls" lists them')
    client = connect(endpoint, jobs)
    local_path = os.fspath(path)
    if local_path.endswith("/") or os.path.isdir(local_path):  # noqa: PTH112
        local_path = os.path.join(local_path, address.name)  # noqa: PTH118
    is_synced = is_durable(durable)
    with sentences(f'download "{address}"', local_path, "download"):
        listing = _listing(client, address)
        if listing is None:
            one = _Download(client, address, jobs, part_bytes, progress)
            return one.single(local_path, durable=is_synced)
        if os.path.lexists(local_path):
            remedy = "remove it, or give another path"
            sentence = f'cannot download "{address}": "{local_path}" already exists'
            raise failure(-errno.EEXIST, sentence, local_path, "download", remedy=remedy)
        one = _Download(client, address, jobs, part_bytes, progress, listing.n_bytes)
        one.directory(listing, local_path, durable=is_synced)
    return Downloaded(local_path, listing.kind, len(listing.files), listing.n_bytes, True)


def _listing(client: Client, address: Address) -> Listing | None:
    """Return the listing of a directory; None if the address is that of a single object."""
    to = address.below(LISTING)
    if head(client, to.bucket, to.key) is None:
        if head(client, address.bucket, address.key) is None:
            raise _incomplete(address)
        return None
    listing = read_listing(client, address, "download")
    last = address.below(listing.last)
    if head(client, last.bucket, last.key) is None:
        raise _incomplete(address)
    return listing


def _incomplete(address: Address) -> StorageError:
    sentence = f'cannot download "{address}": there is no complete checkpoint'
    remedy = 'run "ioshape ls" to see what there is, or upload it (again)'
    return failure(-errno.ENOENT, sentence, str(address), "download", remedy=remedy)


class _Object(NamedTuple):
    """An object to be fetched."""

    address: Address
    n_bytes: int
    #: identifies the wanted version; "": the current one
    etag: str = ""
    #: checksum as S3 writes it; "" if it is not known
    crc32: str = ""
    modified_ns: int | None = None


class _Download:
    def __init__(
        self,
        client: Client,
        address: Address,
        jobs: int,
        part_bytes: int,
        progress: Callable[[Progress], object] | None,
        n_bytes: int = 0,
    ) -> None:
        self._client = client
        self._address = address
        self._jobs = jobs
        self._part_bytes = part_bytes
        self._progress = progress
        self._n_bytes = n_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    def _tell(self, n_bytes: int) -> None:
        with self._lock:
            self._done_bytes += n_bytes
        if self._progress is not None:
            self._progress(Progress("download", self._done_bytes, self._n_bytes))

    # ---- Files and directories ------------------------------------------------------------------

    def single(self, local_path: str, *, durable: bool) -> Downloaded:
        """Download one object, and those with its checksums and statistics if there are any."""
        address = self._address
        file = self._look(address)
        beside = {end: self._look(Address(address.bucket, address.key + end)) for end in BESIDE}
        if file is None:
            raise _incomplete(address)
        self._n_bytes = file.n_bytes
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="ioshape-s3") as pool:
            self._fetch_to(local_path, file, pool, durable=durable)
            for end, small in beside.items():
                if small is not None:
                    self._fetch_to(local_path + end, small, pool, durable=durable)
        return Downloaded(local_path, "file", 1, file.n_bytes, bool(file.crc32))

    def _look(self, address: Address) -> _Object | None:
        told = head(self._client, address.bucket, address.key)
        if told is None:
            return None
        crc32 = str(told.get("ChecksumCRC32") or "")
        modified = str(told.get("Metadata", {}).get(MODIFIED, ""))
        return _Object(
            address,
            length(told, "ContentLength"),
            str(told.get("ETag", "")),
            "" if "-" in crc32 else crc32,  # S3 has only a checksum of checksums
            int(modified) if _NANOSECONDS.fullmatch(modified) else None,
        )

    def directory(self, listing: Listing, local_path: str, *, durable: bool) -> None:
        """Download all listed files into a hidden directory, which then gets its final name."""
        os.makedirs(os.path.dirname(os.path.abspath(local_path)), exist_ok=True)  # noqa: PTH100, PTH103, PTH120
        with Directory(local_path) as made:
            for name in listing.directories:
                os.makedirs(os.path.join(made.path, name), exist_ok=True)  # noqa: PTH103, PTH118
            small = [one for one in listing.files if one.bytes <= self._part_bytes]
            large = [one for one in listing.files if one.bytes > self._part_bytes]

            def fetch(entry: Entry, pool: ThreadPoolExecutor | None = None) -> None:
                to = os.path.join(made.path, entry.name)  # noqa: PTH118
                os.makedirs(os.path.dirname(to), exist_ok=True)  # noqa: PTH103, PTH120
                address = self._address.below(entry.name)
                wanted = _Object(
                    address, entry.bytes, "", in_base64(entry.crc32), entry.modified_ns
                )
                self._fetch_to(to, wanted, pool, durable=False)

            with ThreadPoolExecutor(self._jobs, thread_name_prefix="ioshape-s3") as pool:
                for _ in _in_order(pool, self._jobs, (partial(fetch, one) for one in small)):
                    pass
                for one in large:
                    fetch(one, pool)
            if durable:
                sync_tree(made.path)
            made.commit()

    # ---- One file -------------------------------------------------------------------------------

    def _fetch_to(
        self, path: str, wanted: _Object, pool: ThreadPoolExecutor | None, *, durable: bool
    ) -> None:
        """Fetch the parts of a file at the same time, and write them in order."""
        sums = Sums()

        def fetch(offset: int) -> bytes:
            data = self._fetch(wanted, offset, min(self._part_bytes, wanted.n_bytes - offset))
            sums.add(offset, data)
            return data

        offsets = range(0, wanted.n_bytes, self._part_bytes)
        calls = (partial(fetch, offset) for offset in offsets)
        parts = _in_order(pool, self._jobs, calls) if pool else (call() for call in calls)
        with open_file(path, "wb", durable=durable, expected_bytes=wanted.n_bytes) as file:
            for data in parts:
                file.write(data)
                self._tell(len(data))
            if wanted.crc32 and in_base64(sums.whole()) != wanted.crc32:
                raise self._damaged(wanted, path)
        if wanted.modified_ns is not None:
            os.utime(path, ns=(wanted.modified_ns, wanted.modified_ns))
            if durable:
                sync(path)

    def _fetch(self, wanted: _Object, offset: int, n_bytes: int) -> bytes:
        arguments: dict[str, Any] = {"Bucket": wanted.address.bucket, "Key": wanted.address.key}
        if wanted.etag:
            arguments["IfMatch"] = wanted.etag
        arguments["Range"] = f"bytes={offset}-{offset + n_bytes - 1}"
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                body = self._client.get_object(**arguments)["Body"]
            except ClientError as error:
                if code_of(error) != "InvalidRange":  # the object is shorter
                    raise
                data = b""
                break
            try:
                data = body.read(n_bytes + 1)
            except BROKEN:
                if attempt == _ATTEMPTS:
                    raise
            else:
                break
        if len(data) != n_bytes:
            raise self._damaged(wanted, str(wanted.address))
        return bytes(data)

    def _damaged(self, wanted: _Object, path: str) -> StorageError:
        sentence = (
            f'cannot download "{self._address}": "{wanted.address}" is damaged: its checksum or '
            "length differs from what was uploaded"
        )
        remedy = "upload it again, or use an older checkpoint"
        return failure(lib.IOSHAPE_E_DAMAGED, sentence, path, "download", remedy=remedy)


def _in_order(
    pool: ThreadPoolExecutor, ahead: int, calls: Iterator[Callable[[], Any]]
) -> Iterator[Any]:
    """Yield the results of the calls in order, while up to `ahead` of them run."""
    under_way: deque[Future[Any]] = deque()
    try:
        for call in calls:
            under_way.append(pool.submit(call))
            if len(under_way) >= ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for one in under_way:
            one.cancel()


# ---- Checkpoints on the server -------------------------------------------------------------------
#
# Find the checkpoints on an object store.


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
