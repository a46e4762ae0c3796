# SPDX-License-Identifier: Apache-2.0
"""Connect to object stores with boto3, check their responses, and turn exceptions into ours.

boto3 is Amazon's own client. It finds credentials wherever users keep them.
"""

from __future__ import annotations

import errno
import threading
from base64 import b64encode
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

try:
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.awsrequest import AWSResponse
    from botocore.config import Config
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,  # noqa: A004 - its name
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
        ReadTimeoutError,
    )
    from botocore.response import StreamingBody
except ImportError as error:
    raise ImportError(
        "ioshape.s3 needs the package boto3, which is not installed; install it: "
        "pip install 'ioshape[s3]'"
    ) from error

from ioshape._core.errors import failure
from ioshape._core.text import harmless, without_password
from ioshape._remote.listing import MOST_BYTES, MOST_NAMES
from ioshape._remote.sums import crc32, in_base64, md5_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ioshape._core.errors import StorageError

Response = dict[str, Any]

#: seconds without a byte from the server after which a request has failed; boto3 then repeats it
SILENCE_S = 60


class Client(Protocol):
    """The methods of boto3's client that ioshape uses. boto3 creates them at run time."""

    def abort_multipart_upload(self, **arguments: Any) -> Response: ...
    def delete_object(self, **arguments: Any) -> Response: ...
    def get_object(self, **arguments: Any) -> Response: ...
    def head_object(self, **arguments: Any) -> Response: ...
    def pages(self, operation: str, **arguments: Any) -> Iterator[Mapping[str, Any]]: ...
    def put_object(self, **arguments: Any) -> Response: ...


def connect(endpoint: str | None, jobs: int) -> Client:
    """Return a client. boto3 finds credentials and settings in variables, files, or machine roles.

    Payloads carry checksums in headers. Under TLS they are not hashed again for the signature;
    without TLS they are.

    Args:
        endpoint: The URL of the server; None: the one of boto3's settings.
        jobs: The number of connections.
    """
    session = boto3.session.Session()

    def make(**s3: bool) -> Any:
        config = Config(
            max_pool_connections=jobs,
            connect_timeout=SILENCE_S,
            read_timeout=SILENCE_S,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent_extra="ioshape",
            s3=s3,
        )
        # Signing needs a region, also for servers that have none.
        region = session.region_name or "us-east-1"
        return session.client("s3", region_name=region, endpoint_url=endpoint, config=config)

    with sentences("connect to the object store", without_password(endpoint or ""), "connect"):
        try:
            client = make()
        except ValueError as error:  # about the endpoint
            why = harmless(str(error))
            raise ValueError(f"cannot connect to the object store: {why}") from None
        if client.meta.endpoint_url.startswith("https:"):
            client = make(payload_signing_enabled=False)
    bound(client)
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-call.s3.{operation}", _add_sums)
    return cast("Client", Careful(client))


def _add_sums(params: dict[str, Any], **_: Any) -> None:
    """Add two checksums for the server to compare.

    Some servers know only MD5s, while S3 stores CRC-32s with the object.
    """
    body = params["body"]
    data = body if isinstance(body, bytes) else body.read()
    if data is not body:
        body.seek(0)
    params["headers"]["Content-MD5"] = b64encode(md5_of(data)).decode()
    params["headers"]["x-amz-checksum-crc32"] = in_base64(crc32(data))


# ---- Reasons of failures -------------------------------------------------------------------------


class _Reason(NamedTuple):
    number: int
    why: str
    remedy: str


# characters of a server's message that are shown at most
_MOST_SHOWN = 200
_SERVER = "check --endpoint (or AWS_ENDPOINT_URL_S3) and the server's log"
_AGAIN = "run it again, which sends only what is missing"
_KEYS = "check which credentials this shell has (AWS_PROFILE, AWS_ACCESS_KEY_ID)"
_NO_KEYS = _Reason(
    errno.EACCES,
    "there are no credentials",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
)
_NO_BUCKET = _Reason(errno.ENOENT, "there is no such bucket", "create it, or name another one")
_NO_OBJECT = _Reason(errno.ENOENT, "it does not exist", '"ioshape ls" lists what exists')
_REFUSED = _Reason(
    errno.EACCES, "the server denies access", f"{_KEYS}, and what the server's policy allows them"
)
_CHANGED = _Reason(errno.EBUSY, "another process has replaced it meanwhile", "run it again")
_WRONG_SUM = _Reason(
    errno.EIO,
    "the data arrived with a wrong checksum, several times",
    f"check the network and its proxies, then {_AGAIN}",
)
_BUSY = _Reason(errno.EAGAIN, "the server is too busy", f"use fewer --jobs, or {_AGAIN}")
_FULL = _Reason(errno.ENOSPC, "there is no more space", "free some, or ask for a larger quota")
_CODES = {
    "NoSuchBucket": _NO_BUCKET,
    "NoSuchKey": _NO_OBJECT,
    "404": _NO_OBJECT,
    "NotFound": _NO_OBJECT,
    "PreconditionFailed": _CHANGED,
    "412": _CHANGED,
    "BadDigest": _WRONG_SUM,
    "InvalidDigest": _WRONG_SUM,
    "XAmzContentChecksumMismatch": _WRONG_SUM,
    "XAmzContentSHA256Mismatch": _WRONG_SUM,
    "SlowDown": _BUSY,
    "ServiceUnavailable": _BUSY,
    "503": _BUSY,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "403", "AccountProblem"), _REFUSED),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"),
        _Reason(errno.EACCES, "the server does not know these credentials", _KEYS),
    ),
    "ExpiredToken": _Reason(errno.EACCES, "the credentials have expired", "renew them"),
    "RequestTimeTooSkewed": _Reason(
        errno.EACCES, "this machine's clock is wrong", "set it, for example with NTP"
    ),
}

#: error codes after damage in transit; the bytes may be sent again
WRONG_SUM = tuple(code for code, reason in _CODES.items() if reason is _WRONG_SUM)
#: other errors in transit; boto3 repeats requests, but not the reading of a body
BROKEN = (ConnectionError, HTTPClientError, ReadTimeoutError)


def code_of(error: ClientError) -> str:
    """Return the server's code for an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _reason(error: Exception) -> _Reason:
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return _NO_KEYS
    if isinstance(error, ClientError):
        code = code_of(error)
        told = str(error.response.get("Error", {}).get("Message") or "without a message")
        code, told = code[:_MOST_SHOWN], told[:_MOST_SHOWN]
        return _CODES.get(code) or _Reason(errno.EIO, f'the server says "{code}": {told}', _SERVER)
    if isinstance(error, ReadTimeoutError):
        why = f"the server sent nothing for {SILENCE_S} s"
        return _Reason(
            errno.ETIMEDOUT, why, f"check the network and the server's log, then {_AGAIN}"
        )
    if isinstance(error, BROKEN):
        why = f"the server cannot be reached ({type(error).__name__})"
        remedy = f"check --endpoint (or AWS_ENDPOINT_URL_S3) and the network, then {_AGAIN}"
        return _Reason(errno.EHOSTUNREACH, why, remedy)
    if isinstance(error, AnswerError):
        return _Reason(error.number, error.why, error.remedy)
    return _Reason(errno.EIO, str(error)[:_MOST_SHOWN].rstrip("."), _SERVER)


def _shows_secret(error: BaseException | None) -> bool:
    """Return whether a traceback would print a password: boto3 quotes the server's address."""
    while error is not None:
        text = str(error)
        if without_password(text) != text:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def sentences(doing: str, path: str, operation: str) -> Iterator[None]:
    """Turn exceptions of the client into a StorageError: cannot DOING: why; what to do."""
    try:
        yield
    except (BotoCoreError, Boto3Error, ClientError) as error:
        made = explained(error, doing, path, operation)
        raise made from (None if _shows_secret(error) else error)


def explained(error: Exception, doing: str, path: str, operation: str) -> StorageError:
    """Return the StorageError for an exception of the client."""
    reason = _reason(error)
    sentence = f"cannot {doing}: {reason.why}"
    return failure(-reason.number, sentence, path, operation, remedy=reason.remedy)


def is_absent(error: ClientError) -> bool:
    """Return whether an error only says that there is no such object."""
    return code_of(error) in ("404", "NoSuchKey", "NotFound")


def head(client: Client, bucket: str, key: str) -> Mapping[str, Any] | None:
    """Return the metadata of an object; None if there is no such object."""
    try:
        told = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        length(told, "ContentLength")
        return told
    except ClientError as error:
        if is_absent(error):
            return None
        raise


def sizes(client: Client, bucket: str, prefix: str) -> dict[str, int]:
    """Return the sizes of all objects whose keys begin with a prefix, by key.

    Raises:
        AnswerError: There are more objects than in two of the largest checkpoints.
    """
    found: dict[str, int] = {}
    key_bytes = 0
    for page in client.pages("list_objects_v2", Bucket=bucket, Prefix=prefix):
        for one in page.get("Contents", ()):
            key = field(one, "Key", str)
            key_bytes += len(key)
            found[key] = length(one, "Size")
        if len(found) > 2 * MOST_NAMES or key_bytes > 2 * MOST_BYTES:
            why = f'there are too many objects below "s3://{bucket}/{prefix}"'
            raise AnswerError(why, remedy="remove them, or give another address")
    return found


# ---- Responses of the server ---------------------------------------------------------------------
#
# Check the responses of a server: bound their length, redirects, elements and pages.

#: bytes of a response that is not an object's content at most. A page of 1,000 keys takes 1.5 MiB,
#: or 3.5 MiB if each of their characters is escaped.
MOST_ANSWER_BYTES = 4 << 20
#: elements of a response at most. A page takes 30,000; each costs some 100 bytes of memory, and
#: time.
MOST_TAGS = 100_000
_PIECE_BYTES = 1 << 16
#: redirects in a row at most. A bucket in another region takes one.
MOST_REDIRECTS = 5
#: pages of a listing at most, with 1,000 names each
MOST_PAGES = 1000

_OTHER_SERVER = "check that --endpoint (or AWS_ENDPOINT_URL_S3) names a server of S3"

_Kind = TypeVar("_Kind")


class AnswerError(BotoCoreError):  # type: ignore[misc] # boto3 has no types
    """A response of a server that cannot be used."""

    fmt = "{why}"

    def __init__(
        self, why: str, *, remedy: str = _OTHER_SERVER, number: int = errno.EPROTO
    ) -> None:
        super().__init__(why=why)
        self.why = why
        self.remedy = remedy
        self.number = number


# ---- Limits of bytes and redirects ---------------------------------------------------------------


class _Read:
    """Bytes that have been read already, in place of a connection."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self._data


def _read(raw: Any) -> bytes:
    body, data = StreamingBody(raw, None), bytearray()
    while piece := body.read(_PIECE_BYTES):
        data += piece
        if len(data) > MOST_ANSWER_BYTES:
            raw.close()
            raise AnswerError(f"the server's answer has more than {MOST_ANSWER_BYTES >> 20} MiB")
    if data.count(b"<") > MOST_TAGS:
        raise AnswerError("the server's answer has too many elements")
    return bytes(data)


class _Bounds:
    """A sender for a client's requests that reads the responses itself, with limits.

    Only the content of objects is left to the client.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._redirects = threading.local()

    def send(self, request: Any, **_: Any) -> AWSResponse:
        has_content, request.stream_output = request.stream_output, True
        answer = self._session.send(request)
        self._count_redirects(300 <= answer.status_code < 400)
        if has_content and answer.status_code < 300:
            return answer
        read = _Read(_read(answer.raw))
        return AWSResponse(answer.url, answer.status_code, answer.headers, read)

    def _count_redirects(self, is_one: bool) -> None:
        # boto3 follows a redirect with a new request, which may be redirected again.
        count = getattr(self._redirects, "count", 0) + 1 if is_one else 0
        self._redirects.count = 0 if count > MOST_REDIRECTS else count
        if count > MOST_REDIRECTS:
            remedy = "check --endpoint (or AWS_ENDPOINT_URL_S3) and the region (AWS_REGION)"
            raise AnswerError("the server redirects endlessly", remedy=remedy, number=errno.ELOOP)


def bound(client: Any) -> None:
    """Apply the limits to the responses to a client's requests."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    if session is not None:  # botocore's own session
        client.meta.events.register("before-send.s3", _Bounds(session).send)


# ---- Meaning of responses ------------------------------------------------------------------------


@contextmanager
def understood() -> Iterator[None]:
    """Turn the errors that boto3 raises for a malformed response into an AnswerError."""
    try:
        yield
    except (BotoCoreError, Boto3Error, ClientError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise AnswerError(
            f"the server's answer cannot be understood ({type(error).__name__})"
        ) from error


class Careful:
    """A client whose methods raise only exceptions of boto3."""

    def __init__(self, client: Any) -> None:
        self._client = client
        #: The transfer manager of boto3 reads this attribute.
        self.meta = client.meta

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(**arguments: Any) -> Any:
            with understood():
                return method(**arguments)

        return call

    def pages(self, operation: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the pages of a listing.

        Raises:
            AnswerError: The listing has too many pages.
        """
        with understood():
            pages = iter(self._client.get_paginator(operation).paginate(**arguments))
        for _ in range(MOST_PAGES):
            with understood():
                page = next(pages, None)
            if page is None:
                return
            yield page
        remedy = "give an address with fewer objects below it"
        raise AnswerError(f"the server's list has more than {MOST_PAGES:,} pages", remedy=remedy)


def field(answer: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """Return a field of a response.

    Raises:
        AnswerError: The field is missing or of another type.
    """
    value = answer.get(name)
    if not isinstance(value, kind):
        raise AnswerError(f'the server\'s answer lacks "{name}"')
    return value


def length(answer: Mapping[str, Any], name: str) -> int:
    """Return a field of a response that is the length of an object.

    Raises:
        AnswerError: The field is missing, or out of range.
    """
    n_bytes = field(answer, name, int)
    if not 0 <= n_bytes < 1 << 63:
        raise AnswerError(f'"{name}" in the server\'s answer is out of range')
    return n_bytes
