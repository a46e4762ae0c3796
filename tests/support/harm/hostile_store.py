# SPDX-License-Identifier: Apache-2.0
"""A hostile S3 server. Each of its buckets answers in another wrong way."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, repeat
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LISTING = "run/.ioshape-objects.json"
MIB = 1 << 20

Body = bytes | Iterator[bytes]
Answer = tuple[int, Mapping[str, str], Body]

# ---- Listings ------------------------------------------------------------------------------------


def entry(name: str, **changed: Any) -> dict[str, Any]:
    return {"name": name, "bytes": 1, "crc32": 0, "modified_ns": 0, **changed}


def listing(files: list[Any], directories: list[Any] | None = None) -> bytes:
    head = {"format": "ioshape-objects", "version": 1, "kind": "directory"}
    return json.dumps({**head, "files": files, "directories": directories or []}).encode()


def _around(inner: bytes) -> bytes:
    return listing(["here"]).replace(b'"here"', inner)


def _filled(piece: bytes, n_bytes: int) -> bytes:
    return _around(piece * (n_bytes // len(piece)) + b"1")


def _distinct(n_bytes: int) -> bytes:
    return _around(b",".join(b'{"%d":1}' % i for i in range(n_bytes // 12)))


def _chains() -> list[Any]:
    return [entry(f"{i}/" + 60 * "a/" + "a") for i in range(100_000)]


#: by name: the object that is returned as the listing
LISTINGS: dict[str, Callable[[], Body]] = {
    "deep-names": lambda: listing([entry(2000 * "a/" + "a")]),
    "deep-directories": lambda: listing([], ["/".join(i * ["a"]) for i in range(1, 500)]),
    "deep-arrays": lambda: _around(MIB * b"[" + MIB * b"]"),
    "deep-objects": lambda: _around(MIB * b'{"a":'),
    "surrogates": lambda: listing([entry("\ud800")]),
    "surrogate-bytes": lambda: listing([entry("\udc80")], ["\udcff"]),
    "long-parts": lambda: listing([entry(256 * "a")]),
    "long-names": lambda: listing([entry(30 * MIB * "a")]),
    "wide-text": lambda: _around(b'"' + 5 * MIB * b"\\ud83d\\ude00" + b'"'),
    "large": lambda: _filled(b"1,", 33 * MIB),
    "endless": lambda: repeat(b" " * MIB),
    "many-numbers": lambda: _filled(b"1,", 31 * MIB),
    "many-arrays": lambda: _filled(b"[],", 31 * MIB),
    "some-arrays": lambda: _filled(b"[[]],", 5 * 90_000),
    "many-objects": lambda: _filled(b'{"a":{}},', 31 * MIB),
    "some-objects": lambda: _distinct(12 * 190_000),
    "many-directories": lambda: listing([], [str(i) for i in range(100_001)]),
    "chains": lambda: listing(_chains()),
    "file-and-directory": lambda: listing([entry("a"), entry("a/b")]),
    "long-number": lambda: listing([entry("a", bytes=0)]).replace(
        b'"bytes": 0', b'"bytes": ' + MIB * b"9"
    ),
    "long-fraction": lambda: _around(b"0." + MIB * b"9"),
    "not-utf-8": lambda: listing([]) + b"\xff",
    "not-json": lambda: b"<html>",
    "escapes": lambda: listing([entry("\x1b]0;pwned\x07/../a")]),
}

# ---- Answers -------------------------------------------------------------------------------------


def page(inside: bytes, *, token: str = "") -> bytes:
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    return (
        b"<ListBucketResult>" + inside + (more.encode() if token else b"") + b"</ListBucketResult>"
    )


def _redirected(number: int) -> Answer:
    headers = {"Location": "/", "x-amz-bucket-region": f"region-{number}"}
    return 301, headers, b"<Error><Code>PermanentRedirect</Code></Error>"


def _bomb() -> bytes:
    entities = "".join(f'<!ENTITY a{i + 1} "{10 * f"&a{i};"}">' for i in range(12))
    text = f'<!DOCTYPE a [<!ENTITY a0 "a">{entities}]>'
    return text.encode() + page(b"<Prefix>&a12;</Prefix>")


_numbers = count()

#: by name: the answer to every request
ANSWERS: dict[str, Callable[[], Answer]] = {
    "redirects": lambda: (301, {}, b""),
    "other-redirects": lambda: (307, {"Location": "/redirects/a"}, b""),
    "regions": lambda: _redirected(next(_numbers)),
    "odd-regions": lambda: (301, {"x-amz-bucket-region": "a/../b@c:d"}, b""),
    "endless-error": lambda: (400, {}, repeat(b"<a>" + 65536 * b"a")),
    "long-error": lambda: (
        400,
        {},
        b"<Error><Code>a</Code><Message>" + MIB * b"\x1b" + b"</Message></Error>",
    ),
    "endless-answer": lambda: (200, {}, repeat(65536 * b" ")),
    "no-length": lambda: (200, {}, b""),
    "negative-length": lambda: (200, {"Content-Length": "-1"}, b""),
    "huge-length": lambda: (200, {"Content-Length": 30 * "9"}, b""),
    "odd-length": lambda: (200, {"Content-Length": "\u00b2"}, b""),
    "many-headers": lambda: (200, {f"x-{i}": 60_000 * "a" for i in range(200)}, b""),
    "odd-xml": lambda: (200, {}, b"<a><b></a>"),
    "no-xml": lambda: (200, {}, b"\x00\xff"),
    "bomb": lambda: (200, {}, _bomb()),
    "many-elements": lambda: (200, {}, page(b"<a/>" * ((4 << 20) // 4 - 100))),
    "many-contents": lambda: (200, {}, page(b"<Contents/>" * 300_000)),
    "deep-elements": lambda: (200, {}, page(b"<a>" * 500_000 + b"</a>" * 500_000)),
    "no-keys": lambda: (200, {}, page(b"<Contents><Size>1</Size></Contents>")),
    "odd-sizes": lambda: (200, {}, page(b"<Contents><Key>run/a</Key><Size>a</Size></Contents>")),
    "odd-times": lambda: (
        200,
        {},
        page(f"<Contents><Key>{LISTING}</Key><LastModified>a</LastModified></Contents>".encode()),
    ),
    "far-times": lambda: (
        200,
        {},
        page(
            f"<Contents><Key>{LISTING}</Key>"
            "<LastModified>4294967295-01-01T00:00:00Z</LastModified></Contents>".encode()
        ),
    ),
    "no-times": lambda: (200, {}, page(f"<Contents><Key>{LISTING}</Key></Contents>".encode())),
    "endless-pages": lambda: (200, {}, page(b"", token=str(next(_numbers)))),
    "same-token": lambda: (200, {}, page(b"", token="a")),
}


def answer(
    bucket: str,
    method: str,
    key: str,
    query: Mapping[str, Any],
    made: Mapping[str, bytes] | None = None,
) -> Answer:
    """Return the server's answer; `made` has listings that were made before."""
    if bucket in ANSWERS:
        return ANSWERS[bucket]()
    if "list-type" in query:
        inside = f"<Contents><Key>{LISTING}</Key><Size>1</Size>" + (
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
        return 200, {}, page(inside.encode())
    if key != LISTING:
        return 404, {}, b""
    if method == "HEAD":
        return 200, {"Content-Length": "1", "ETag": '"a"'}, b""
    if made and bucket in made:
        return 200, {}, made[bucket]
    return 200, {}, LISTINGS[bucket]() if bucket in LISTINGS else listing([])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        n_bytes = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(n_bytes)
        status, headers, body = answer(bucket, self.command, key, parse_qs(url.query))
        self.close_connection = True
        with suppress(OSError):  # the client has closed the connection
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                for piece in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(piece)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - their names


@contextmanager
def serving() -> Iterator[str]:
    """Run the server. Yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
