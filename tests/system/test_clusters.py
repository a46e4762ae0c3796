# SPDX-License-Identifier: Apache-2.0
"""Test that tests/testbed leaves nothing of its clusters behind."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from clusters import PROGRAMS, ClusterError, order, running, unavailable

pytestmark = [pytest.mark.realfs, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


def processes_with(text: str) -> list[str]:
    """Return the command lines of processes that have a text there or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
            names = text.encode() in line + (process / "environ").read_bytes()
        except OSError:
            continue
        if names and int(process.name) != os.getpid():
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.parametrize("kind", PROGRAMS)
def test_nothing_is_left_after_a_crash_of_all_servers(kind: str) -> None:
    volumes = Path("/var/lib/glusterd/vols")
    known = set(volumes.glob("*"))
    spaces = Path("/run/netns")
    named = set(spaces.glob("*"))
    with running(kind, targets=1) as made:
        folder = str(made.path.parent)
        assert processes_with(folder)
        order("harm", made.path, "stop", "all")
    assert not Path(folder).exists()
    assert folder not in Path("/proc/self/mounts").read_text(encoding="utf-8")
    devices = subprocess.run(["losetup"], check=True, capture_output=True, text=True).stdout
    assert folder not in devices
    end = time.monotonic() + 20
    while processes_with(folder) and time.monotonic() < end:
        time.sleep(0.2)  # a client that was just unmounted may still run
    assert processes_with(folder) == []
    assert set(spaces.glob("*")) == named
    assert set(volumes.glob("*")) == known


@pytest.mark.parametrize("kind", PROGRAMS)
def test_requests_of_clients_are_counted(kind: str) -> None:
    with running(kind, targets=1) as made:
        before = json.loads(order("requests", made.path))
        for number in range(5):
            (made.path / f"file-{number}").touch()
        after = json.loads(order("requests", made.path))
    if kind == "moosefs":  # its servers do not count requests
        assert before == after == {}
    else:
        assert sum(after.values()) - sum(before.values()) >= 5


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "mkfs.xfs"
    failing.write_text("#!/bin/sh\necho no disk >&2\nexit 3\n", encoding="ascii")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (
        pytest.raises(
            ClusterError, match=r"no disk\nup.sh: cannot start glusterfs in (\S+)"
        ) as told,
        running("glusterfs"),
    ):
        raise AssertionError
    folder = str(told.value).partition(" in ")[2].split()[0]
    assert not Path(folder).exists()
    devices = subprocess.run(["losetup"], check=True, capture_output=True, text=True).stdout
    assert folder not in devices
