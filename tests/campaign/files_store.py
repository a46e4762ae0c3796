# SPDX-License-Identifier: Apache-2.0
"""Make answers of an S3 server for the kind "files", with random damage or hostile.

No server runs: boto3 gets the answers instead of a connection. Listings, lists of keys, headers and
contents are damaged. A list of keys has no checksum, so only downloads are compared with the
uploaded data.
"""

import base64
import contextlib
import functools
import io
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import botocore.httpsession
import hostile_store
import ioshape
import object_store
from botocore.awsrequest import AWSResponse
from ioshape import s3
from ioshape._remote import client, download, listing
from urllib3 import HTTPResponse

from .damage import TEXT

ENDPOINT = "http://127.0.0.1:1"
BUCKET = "damaged"
FILES = {"a.pt": bytes(range(256)), "sub/b.pt": 40 * b"weights", "sub/empty": b""}
#: Approximate number of requests in a download.
REQUESTS = 7
#: Fraction of hostile inputs. They do not vary and take long, so one input in 500 is hostile.
HOSTILE_PART = 0.002
#: Fraction of inputs of which only the listing is read, in a hundredth of the time.
LISTINGS_PART = 0.6

# ---- Answers ------------------------------------------------------------------------------------


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _listing() -> bytes:
    entries = tuple(
        listing.Entry(name, len(data), zlib.crc32(data), 1_700_000_000 * 10**9)
        for name, data in FILES.items()
    )
    return listing.encode(listing.Listing("directory", entries, ("sub",)))


_OBJECTS = {
    "one.pt": FILES["a.pt"],
    hostile_store.LISTING: _listing(),
    **{f"run/{name}": data for name, data in FILES.items()},
}


def _list() -> bytes:
    time = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    return hostile_store.page(
        "".join(
            f"<Contents><Key>{key}</Key>{time}<Size>{len(data)}</Size></Contents>"
            for key, data in _OBJECTS.items()
        ).encode()
    )


def _valid(method: str, key: str, query: Mapping[str, Any], part: str) -> hostile_store.Answer:
    if "list-type" in query:
        return 200, {}, _list()
    data = _OBJECTS.get(key)
    if data is None:
        return 404, {}, b""
    headers = {"ETag": '"a"', "x-amz-checksum-crc32": _crc32(data)}
    if method == "HEAD":
        return 200, {"Content-Length": str(len(data)), **headers}, b""
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", part)
    if asked:
        data = data[int(asked[1]) : int(asked[2]) + 1]
        return 206, {"Content-Length": str(len(data))}, data
    return 200, {"Content-Length": str(len(data)), **headers}, data


@functools.cache
def _hostile_listings() -> dict[str, bytes]:
    """Return hostile listings. They are made once, so that making them is not measured."""
    made = {name: make() for name, make in hostile_store.LISTINGS.items()}
    return {name: body for name, body in made.items() if isinstance(body, bytes)}


class _Pieces(io.RawIOBase):
    """A body that may be endless."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._pieces, b"")
        length = min(len(buffer), len(self._left))
        buffer[:length], self._left = self._left[:length], self._left[length:]
        return length


class _Store:
    """A store that answers requests, one of which may be damaged."""

    def __init__(self, rng: Random, damaged: int) -> None:
        self._rng = rng
        self._left = damaged

    def send(self, request: Any) -> Any:
        url = urlsplit(request.url)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query)
        if bucket == BUCKET:
            asked = request.headers.get("Range", b"")
            part = asked.decode() if isinstance(asked, bytes) else asked
            status, headers, body = self._damaged(*_valid(request.method, key, query, part))
        else:
            status, headers, body = hostile_store.answer(
                bucket, request.method, key, query, _hostile_listings()
            )
            body = b"" if request.method == "HEAD" else body
        file = io.BytesIO(body) if isinstance(body, bytes) else _Pieces(body)
        raw = HTTPResponse(
            body=file,
            headers=headers,
            status=status,
            preload_content=False,
            request_method=request.method,
        )
        return AWSResponse(request.url, status, raw.headers, raw)

    def _damaged(self, status: int, headers: Mapping[str, str], body: Any) -> hostile_store.Answer:
        self._left -= 1
        if self._left:
            return status, headers, body
        rng = self._rng
        if headers and (not body or rng.random() < 0.3):
            name = rng.choice(sorted(headers))
            value = headers[name].encode()
            changed = rng.choice(TEXT)(rng, value, [value]).decode("latin-1")
            return status, {**headers, name: changed}, body
        if body:
            body = rng.choice(TEXT)(rng, body, [body])
        if rng.random() < 0.9:  # otherwise the connection breaks
            headers = {**headers, "Content-Length": str(len(body))}
        return status, headers, body


# ---- Reading answers ----------------------------------------------------------------------------


@functools.cache
def connect(folder: Path) -> None:
    """Give ioshape.s3 a client without a server. It is made once, because that takes long."""
    os.environ.update(
        object_store.variables(ENDPOINT, folder), AWS_RETRY_MODE="standard", AWS_MAX_ATTEMPTS="1"
    )
    # With a single attempt no time passes between attempts.
    made = client.connect(ENDPOINT, 1)
    download.connect = lambda *_: made  # type: ignore[attr-defined]
    _hostile_listings()


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def answers(
    path: Path,
    rng: Random,
    refused: Callable[[Exception], None],
    silent: Callable[[str], Exception],
) -> None:
    """Try answers of an object store: one is damaged, or all are hostile."""
    if rng.random() < LISTINGS_PART:
        _decode(rng)
        return
    connect(path.parent)
    bucket, damaged = BUCKET, 1 + rng.randrange(REQUESTS)
    if rng.random() < HOSTILE_PART:
        bucket = rng.choice([*hostile_store.LISTINGS, *hostile_store.ANSWERS])
    store = _Store(rng, damaged)
    botocore.httpsession.URLLib3Session.send = lambda _session, request: store.send(request)
    try:
        if rng.random() < 0.5:
            s3.checkpoints(f"s3://{bucket}")
        else:
            _download(bucket, rng.choice(("run", "run", "one.pt")), path, silent)
    except ioshape.StorageError as error:
        refused(error)


def _decode(rng: Random) -> None:
    data = _OBJECTS[hostile_store.LISTING]
    with contextlib.suppress(ValueError):
        listing.decode(rng.choice(TEXT)(rng, data, [data]))


def _download(bucket: str, name: str, path: Path, silent: Callable[[str], Exception]) -> None:
    to = path.with_name("downloaded")
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    told = s3.download(f"s3://{bucket}/{name}", to / "it", durable=False, jobs=1)
    wanted = FILES if name == "run" else {".": FILES["a.pt"]}
    found = _tree(to / "it") if name == "run" else {".": (to / "it").read_bytes()}
    if bucket == BUCKET and told.verified and found != wanted:
        raise silent("is downloaded, and is not what was uploaded")
