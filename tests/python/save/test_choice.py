# SPDX-License-Identifier: Apache-2.0
"""The request sizes and the engine that ioshape chooses for several kinds of filesystems."""

import json
import logging
import os
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ioshape
import pytest
from checkpoints import checkpoint
from ioshape._core import config
from processes import TIMEOUT_S
from striped import Mount, striped
from tree import build_folder

pytestmark = pytest.mark.usefixtures("_mounts_of_stripefs")

MIB = 1 << 20


def write(path: Path, n_bytes: int, *words: str) -> dict[str, Any]:
    """Write a file with tests/c/support/requests.c, and return what the program reports."""
    done = subprocess.run(
        [build_folder() / "tests" / "c" / "requests", path, str(n_bytes), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def busy_s(mount: Mount) -> float:
    """Return the busy time of all targets.

    Requests that are served one by one take at least as long together.
    """
    return sum(float(target["busy_s"]) for target in mount.statistics()["targets"])


def write_side_by_side(mount: Mount, n_bytes: int, engine: str) -> dict[str, Any]:
    """Write files until one shows that its targets worked at the same time, and return its report.

    Requests that are sent one after the other never overlap. Other requests overlap only if the
    machine has time for them.
    """
    for _ in range(20):
        before_s = busy_s(mount)
        found = write(mount.path / "file", n_bytes, engine)
        if found["seconds"] < busy_s(mount) - before_s:
            return found
    raise AssertionError(found)


LAYOUTS: list[tuple[bool, dict[str, object]]] = [
    # whether the layout is only for long runs, and the layout
    (True, {"stripe_size": "1Mi", "stripe_count": 8}),
    (True, {"stripe_size": "4Mi", "stripe_count": 3}),
    (False, {"stripe_size": "3Mi", "stripe_count": 2}),
    (True, {"stripe_size": "16Mi", "stripe_count": 4}),
    (False, {"progressive": "4Mi:1:1Mi,24Mi:2:1Mi,eof:8:4Mi"}),
    (False, {"play": "beegfs", "stripe_size": "512Ki", "stripe_count": 4}),
    (True, {"play": "ceph", "stripe_size": "4Mi", "stripe_count": 2}),
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout, id="-".join(map(str, layout.values())), marks=[pytest.mark.long] if long else []
        )
        for long, layout in LAYOUTS
    ],
)
def test_no_request_crosses_a_stripe_or_begins_in_one(layout: dict[str, object]) -> None:
    with striped("ssd", bandwidth="20G", seek_ms=0, **layout) as mount:
        if layout.get("play") == "ceph":
            # Without a layout, the directory does not reveal the filesystem behind FUSE.
            os.setxattr(mount.path, "ceph.dir.layout", b"stripe_unit=4194304 stripe_count=2")
        found = write(mount.path / "file", 40 * MIB + 777)
        assert found["requests"] > 2
        assert (found["crossing"], found["off_stripe"]) == (0, 0)
        seen = mount.statistics()["writes"]
        assert (seen["crossing"], seen["off_stripe"], seen["misaligned"]) == (0, 0, 0)


def slow(fsname: str, **parameters: object) -> AbstractContextManager[Mount]:
    """Mount a filesystem that takes 17 ms for a MiB.

    A busy machine rarely delays a thread for so long.
    """
    return striped("ssd", bandwidth="60M", seek_ms=0, stripe_count=8, fsname=fsname, **parameters)


@pytest.mark.parametrize("direct", ["threads", "parallel"])
def test_a_network_filesystem_gets_an_engine_that_does_not_wait(direct: str) -> None:
    # With "threads", the mount serves calls one by one.
    with slow(direct, direct=direct) as mount:
        found = write_side_by_side(mount, 20 * MIB, "auto")
        assert (found["engine"], found["direct"]) == ("uring-async", 1), found
        assert found["block_bytes"] == MIB
        assert [path.name for path in mount.path.iterdir()] == ["file"]


def test_a_local_filesystem_gets_the_plain_engine(tmp_path: Path) -> None:
    found = write(tmp_path / "file", 5 * MIB, "auto")
    assert (found["engine"], found["choice"]) == ("uring", "local filesystem")


def test_the_log_tells_why_a_file_was_written_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="ioshape")
    with striped("ssd", bandwidth="20G", stripe_count=4, fsname="told", seek_ms=0) as mount:
        path = mount.path / "model.pt"
        try:
            ioshape.save(checkpoint(1, 1000), path)
            assert "buffered engine (small file: one write call)" in caplog.text
            report = ioshape.save(checkpoint(2, 17 * MIB), path)
            assert "direct I/O (network filesystem; 4 stripes of 1M)" in caplog.text
            assert report.engine == "uring-async"
            ioshape.configure(engine="threads")
            report = ioshape.save(checkpoint(3, 17 * MIB), path)
            assert report.engine == "threads"
            assert "(engine as requested; 4 stripes of 1M)" in caplog.text
        finally:
            config.reset()


def test_files_that_cannot_be_reserved_are_not_extended_block_by_block() -> None:
    with slow("unreserved", fallocate="no") as mount:
        write_side_by_side(mount, 80 * MIB + 5, "uring")
        assert (mount.path / "file").stat().st_size == 80 * MIB + 5
