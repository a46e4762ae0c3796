# SPDX-License-Identifier: Apache-2.0
"""ioshape.s3 against hostile S3 servers: a clear error, with bounded time and memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_store
import pytest
from object_store import variables
from processes import TIMEOUT_S, environment

MOST_BYTES = 256 << 20
# CPU seconds for a bucket. CPU time does not grow on a busy machine.
MOST_CPU_S = int(TIMEOUT_S)
PATIENCE_S = 10 * TIMEOUT_S

# The program limits its memory to what it has plus a margin, and calls ioshape.s3 for each bucket.
PROGRAM = """
import json, os, resource, sys, tempfile
from ioshape import s3
from ioshape._remote import client, download, upload

endpoint, most_bytes, most_cpu_s, folder, *buckets = sys.argv[1:]
folder = tempfile.mkdtemp(dir=folder)
made = client.connect(endpoint, 2)
for module in (download, upload):
    module.connect = lambda *_: made  # to make one takes longer than all else
calls = {
    "download": lambda url: s3.download(url, folder + "/a", jobs=2),
    "list": lambda url: s3.checkpoints(url),
    "upload": lambda url: s3.upload(folder + "/sound", url, jobs=2),
}
s3.download("s3://sound/run", folder + "/sound", jobs=2)
s3.checkpoints("s3://sound/run")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(most_bytes)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for bucket in buckets:
    cpu_s = int(sum(os.times()[:2])) + int(most_cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    for name, call in calls.items():
        told = {"bucket": bucket, "call": name, "error": ""}
        begin_s = sum(os.times()[:2])
        try:
            call(f"s3://{bucket}/run")
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
            told["remedy"] = getattr(error, "remedy", "")
            told["is_ours"] = hasattr(error, "facts")
        told["cpu_s"] = sum(os.times()[:2]) - begin_s
        print(json.dumps(told), flush=True)
    assert os.listdir(folder) == ["sound"], os.listdir(folder)
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with hostile_store.serving() as address:
        yield address


def ask(endpoint: str, folder: Path, buckets: list[str]) -> list[dict[str, Any]]:
    command = (sys.executable, "-c", PROGRAM, endpoint, str(MOST_BYTES), str(MOST_CPU_S))
    # Each arena of malloc() would take 64 MiB of address space.
    env = environment(**variables(endpoint, folder), MALLOC_ARENA_MAX="1")
    done = subprocess.run(
        (*command, folder, *buckets),
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-2000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["LISTINGS", "ANSWERS"])
def test_no_server_takes_long_or_much_memory_or_raises_anything_else(
    kind: str, endpoint: str, tmp_path: Path
) -> None:
    buckets = list(getattr(hostile_store, kind))
    told = ask(endpoint, tmp_path, buckets)
    assert len(told) == 3 * len(buckets)
    for one in told:
        if not one["error"]:
            assert one["call"] != "download", one
            continue
        assert one["is_ours"], one
        assert not one["error"].startswith("MemoryError"), one
        assert "MemoryError" not in one["error"], one
        assert one["error"].isprintable(), one
        assert len(one["error"]) < 1000, one
        assert f"s3://{one['bucket']}" in one["error"], one
        assert one["remedy"], one
