# SPDX-License-Identifier: Apache-2.0
"""Check the responses of a server: bound their length, redirects, elements and pages."""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from boto3.exceptions import Boto3Error
from botocore.awsrequest import AWSResponse
from botocore.exceptions import BotoCoreError, ClientError
from botocore.response import StreamingBody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

#: bytes of a response that is not an object's content at most. A page of 1,000 keys takes 1.5 MiB,
#: or 3.5 MiB if each of their characters is escaped.
MOST_BYTES = 4 << 20
#: elements of a response at most. A page takes 30,000; each costs some 100 bytes of memory, and
#: time.
MOST_TAGS = 100_000
_PIECE_BYTES = 1 << 16
#: redirects in a row at most. A bucket in another region takes one.
MOST_REDIRECTS = 5
#: pages of a listing at most, with 1,000 names each
MOST_PAGES = 1000

_SERVER = "check that --endpoint (or AWS_ENDPOINT_URL_S3) names a server of S3"

_Kind = TypeVar("_Kind")


class AnswerError(BotoCoreError):  # type: ignore[misc] # boto3 has no types
    """A response of a server that cannot be used."""

    fmt = "{why}"

    def __init__(self, why: str, *, remedy: str = _SERVER, number: int = errno.EPROTO) -> None:
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
        if len(data) > MOST_BYTES:
            raw.close()
            raise AnswerError(f"the server's answer has more than {MOST_BYTES >> 20} MiB")
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
