# SPDX-License-Identifier: Apache-2.0
"""S3 servers in processes of their own: moto's, and that of rclone, which supports only MD5.

In front of moto's is a layer with features that it lacks and real servers have: it refuses a part
with a wrong checksum. This layer also injects the faults of tests. As a program it serves until it
is ended:

    object_store.py PORT-FILE
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from processes import environment

KEY, SECRET = "AKIDEXAMPLE00000", "wJalrXUtnFEMIexample"
BUCKET = "checkpoints"
_START_S = 60.0
_CONTROL = "/-harm"
_ODD = b"-odd"
_ABOUT_SUMS = ("HTTP_X_AMZ_CHECKSUM", "HTTP_X_AMZ_SDK_CHECKSUM")

# ---- The server ----------------------------------------------------------------------------------


class Front:
    """The layer that every request passes."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._harm: dict[str, Any] = {}
        self._seen = 0
        self._log: list[str] = []

    def __call__(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if request["PATH_INFO"] == _CONTROL:
            return self._control(request, start)
        self._seen = seen = self._seen + 1
        self._log.append(f"{request['REQUEST_METHOD']} {request['PATH_INFO']}")
        harm = self._harm
        if harm.get("gone_at") and self._seen >= harm["gone_at"]:
            os._exit(1)
        if harm.get("silent") and self._log[-1].startswith(harm["silent"]):
            self._be_silent(harm)
        if harm.get("deny"):
            return self._refuse(start, "403 Forbidden", "AccessDenied")
        length = int(request.get("CONTENT_LENGTH") or 0)
        body = request["wsgi.input"].read(length) if length else b""
        if seen == harm.get("kill_at"):
            os.kill(harm["pid"], signal.SIGKILL)  # the client; the request is served nevertheless
        if request["REQUEST_METHOD"] == "PUT" and length > 1000 and harm.get("flips"):
            harm["flips"] -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        if harm.get("knows_no_crc32"):
            for name in [one for one in request if one.startswith(_ABOUT_SUMS)]:
                del request[name]
        if not self._is_right(request, body):
            return self._refuse(start, "400 Bad Request", "BadDigest")
        if harm.get("odd_etags"):
            body = body.replace(_ODD, b"")
            request["CONTENT_LENGTH"] = str(len(body))
            start = self._oddly(start)
        request["wsgi.input"] = BytesIO(body)
        if harm.get("half_bodies"):
            return self._half(self._app(request, start), harm)
        return self._app(request, start)

    def _be_silent(self, harm: dict[str, Any]) -> None:
        while self._harm is harm:
            time.sleep(0.05)

    def _half(self, body: Iterable[bytes], harm: dict[str, Any]) -> Iterator[bytes]:
        """Send one half of a body, and then nothing, while the connection stays open."""
        data = b"".join(body)
        yield data[: len(data) // 2]
        if len(data) > 1000:
            self._be_silent(harm)
        yield data[len(data) // 2 :]

    @staticmethod
    def _oddly(start: Callable[..., Any]) -> Callable[..., Any]:
        """Change the ETag, as for encrypted objects: it then says nothing about the content."""

        def answer(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            odd = [
                (name, value[:-1] + _ODD.decode() + '"' if name.lower() == "etag" else value)
                for name, value in headers
            ]
            return start(status, odd, *more)

        return answer

    @staticmethod
    def _is_right(request: dict[str, Any], body: bytes) -> bool:
        sums = {
            "HTTP_X_AMZ_CHECKSUM_CRC32": zlib.crc32(body).to_bytes(4, "big"),
            "HTTP_CONTENT_MD5": hashlib.md5(body).digest(),
        }
        return request["REQUEST_METHOD"] != "PUT" or all(
            request.get(name) in (None, base64.b64encode(found).decode())
            for name, found in sums.items()
        )

    def _control(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        length = int(request.get("CONTENT_LENGTH") or 0)
        self._harm = json.loads(request["wsgi.input"].read(length))
        log, self._log, self._seen = self._log, [], 0
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(log).encode()]

    @staticmethod
    def _refuse(start: Callable[..., Any], status: str, code: str) -> Iterable[bytes]:
        start(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]


def serve(port_file: Path) -> None:
    """Serve until this process is ended."""
    from moto.moto_server.werkzeug_app import (  # noqa: PLC0415
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import WSGIRequestHandler, make_server  # noqa: PLC0415

    class Silent(WSGIRequestHandler):  # type: ignore[misc] # no types are looked at
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - its names
            pass

    front = Front(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, front, threaded=True, request_handler=Silent)
    ready = port_file.with_suffix(".new")
    ready.write_text(str(server.port))
    ready.rename(port_file)
    server.serve_forever()


# ---- Interface for tests -------------------------------------------------------------------------


@dataclass
class Store:
    """A running server with a bucket."""

    endpoint: str
    process: "subprocess.Popen[bytes]"
    variables: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def client(self) -> Any:
        """A client that is not ioshape's."""
        import boto3  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        return boto3.session.Session(KEY, SECRET, region_name="us-east-1").client(
            "s3",
            endpoint_url=self.endpoint,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def harm(self, **what: Any) -> list[str]:
        """Set the faults from the next request on. Return the requests since the last call."""
        data = json.dumps(what).encode()
        request = urllib.request.Request(self.endpoint + _CONTROL, data)
        with urllib.request.urlopen(request, timeout=30) as answer:
            log: list[str] = json.loads(answer.read())
            return log

    def objects(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects with this prefix."""
        pages = self.client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=BUCKET, Prefix=prefix)
        return [one["Key"] for page in found for one in page.get("Contents", ())]

    def forget_the_dead(self) -> None:
        """Wait until all requests of clients that are dead by now have been served."""
        # CLOSE_WAIT is the state of our end of a connection that the client has closed, until the
        # request is served.
        closed = re.compile(rf":{int(self.endpoint.rpartition(':')[2]):04X} 0100007F:\w+ 08 ")
        end = time.monotonic() + _START_S
        while closed.search(Path("/proc/net/tcp").read_text()):
            assert time.monotonic() < end, "the S3 server hangs"
            time.sleep(0.01)

    def uploads(self) -> list[str]:
        """Return the keys of incomplete multipart uploads."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET)
        return [one["Key"] for one in found.get("Uploads", ())]


def variables(endpoint: str, folder: Path) -> dict[str, str]:
    """Return the variables for a client, without settings of the user who runs the tests."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "2",
    }


def _wait(process: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _START_S
    while not condition():
        assert process.poll() is None, "the S3 server has ended"
        assert time.monotonic() < end, "the S3 server does not start"
        time.sleep(0.05)


@contextmanager
def _running(command: list[str]) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def moto(folder: Path) -> Iterator[Store]:
    """Run moto's server behind the layer."""
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    with _running([sys.executable, __file__, str(port_file)]) as process:
        _wait(process, port_file.exists)
        endpoint = f"http://127.0.0.1:{port_file.read_text()}"
        store = Store(endpoint, process, variables(endpoint, folder))
        store.client.create_bucket(Bucket=BUCKET)
        yield store


@contextmanager
def rclone(folder: Path) -> Iterator[Store]:
    """Run rclone's server, whose objects are files in the folder."""
    socket = folder / "rclone.log"
    (folder / "objects" / BUCKET).mkdir(parents=True)
    program = Path(sys.executable).parent / "rclone"
    arguments = ["--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}", "--log-file"]
    serving = [str(program), "serve", "s3", *arguments, str(socket), str(folder / "objects")]

    def address() -> str:
        with contextlib.suppress(FileNotFoundError):
            _, _, found = socket.read_text().partition("s3 server on [http://")
            return found.partition("/]")[0]
        return ""

    with _running(serving) as process:
        _wait(process, lambda: bool(address()))
        endpoint = f"http://{address()}"
        yield Store(endpoint, process, variables(endpoint, folder))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
