# SPDX-License-Identifier: Apache-2.0
"""Test real parallel filesystems whose servers are killed, or whose targets are full."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import ioshape
import pytest
from checkpoints import checkpoint, left_clean, names_in, number_loaded
from clusters import Mounted, kinds
from held import Held, held
from ioshape._core import config

MIB = 1 << 20
#: Seconds until a restarted server and its clients work again.
BACK_S = 120.0

pytestmark = pytest.mark.realfs


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    with left_clean():
        ioshape.configure(job="realfs", examine="off")
        yield
        monkeypatch.undo()


@pytest.fixture
def folder(cluster: Mounted, request: pytest.FixtureRequest) -> Path:
    made = cluster.path / f"{request.node.originalname}-{time.time_ns()}"
    made.mkdir()
    return made


# ---- Servers that are killed during a save ------------------------------------------------------


def target_of(cluster: Mounted, path: Path) -> str:
    """Return the target that holds a file, or one of those that hold parts."""
    if cluster.kind != "glusterfs":
        return "target-1"
    told = os.getxattr(path, "trusted.glusterfs.pathinfo").decode()
    return told.partition("/brick/")[0].rpartition("/")[2]


def kill_and_start(cluster: Mounted, server: str, save: Held) -> dict[str, object]:
    """Kill a server, let the save run without it for a while, and restart the server."""
    cluster.harm("stop", server)
    save.go_on()
    time.sleep(3)
    cluster.harm("start", server)
    return save.end()


def assert_saves_again(cluster: Mounted, path: Path, number: int) -> None:
    """Save until it works, because clients find a restarted server after some seconds.

    The first save of a new context into a folder removes leftovers of other processes.
    """
    config.reset()
    ioshape.configure(job="realfs")
    end = time.monotonic() + BACK_S
    while True:
        try:
            ioshape.save(checkpoint(number, 32 * MIB), path)
            break
        except ioshape.StorageError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    assert (
        number_loaded(path)
        == number_loaded(cluster.other / path.relative_to(cluster.path))
        == number
    )
    assert names_in(path.parent) == [path.name]


@pytest.mark.parametrize("phase", ["write", "sync"])
@pytest.mark.parametrize(
    "cluster", [one for one in kinds() if one in ("cephfs", "moosefs")], indirect=True
)
def test_the_metadata_server_is_killed_while_a_save_writes(
    cluster: Mounted, folder: Path, tmp_path: Path, phase: str
) -> None:
    """Check that the save waits for the server and succeeds."""
    path = folder / "model.pt"
    ioshape.save(checkpoint(1, 32 * MIB), path)
    with held(tmp_path, "save", path, 2, phase=phase) as save:
        told = kill_and_start(cluster, "metadata", save)
    assert told == {"errno": 0}
    assert number_loaded(path) == number_loaded(cluster.other / folder.name / "model.pt") == 2
    assert_saves_again(cluster, path, 3)


@pytest.mark.parametrize("phase", ["write", "sync"])
def test_a_target_is_killed_while_a_save_writes(
    cluster: Mounted, folder: Path, tmp_path: Path, phase: str
) -> None:
    """Check the save: GlusterFS reports the lost target, MooseFS writes elsewhere, others wait."""
    path = folder / "model.pt"
    ioshape.save(checkpoint(1, 32 * MIB), path)
    with held(tmp_path, "save", path, 2, phase=phase) as save:
        told = kill_and_start(cluster, target_of(cluster, path), save)
    if cluster.kind == "glusterfs":
        assert told["errno"] in (errno.ENOTCONN, errno.EBADFD), told
        assert str(path) in str(told["sentence"])
    else:
        assert told == {"errno": 0}
    end = time.monotonic() + BACK_S
    while True:
        try:
            found = number_loaded(path)
            break
        except OSError:
            assert time.monotonic() < end, "the file is lost"
            time.sleep(0.5)
    assert found == (1 if told["errno"] else 2)
    assert_saves_again(cluster, path, 3)


# ---- Full targets --------------------------------------------------------------------------------


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def write_unannounced(path: Path) -> None:
    """Write a file of unknown length, so that the storage fills up in the middle."""
    with ioshape.open(path, "wb") as file:
        for _ in range(128):
            file.write(bytes(MIB))


def test_no_target_has_space(cluster: Mounted, folder: Path) -> None:
    path = folder / "model.pt"
    ioshape.save(checkpoint(1, 8 * MIB), path)
    before = free_bytes(folder)
    end = time.monotonic() + BACK_S
    try:
        while free_bytes(folder) >= 100 * MIB:
            assert time.monotonic() < end, "it does not fill up"
            cluster.harm("fill", "5")  # again, because the space of removed files is freed late
            time.sleep(2)
        with pytest.raises(ioshape.StorageError) as full:
            ioshape.save(checkpoint(2, 128 * MIB), path)
        assert full.value.errno == errno.ENOSPC
        needed, free = full.value.needed_bytes, full.value.free_bytes
        assert needed is not None
        assert free is not None
        assert needed >= 128 * MIB > free
        assert "needs 128" in str(full.value)
        # CephFS and GlusterFS check only every few seconds whether a target is full.
        if cluster.kind not in ("cephfs", "glusterfs"):
            with pytest.raises(ioshape.StorageError) as full:
                write_unannounced(path)
            assert full.value.errno == errno.ENOSPC
        assert number_loaded(path) == 1
        assert names_in(folder) == ["model.pt"]
    finally:
        cluster.harm("empty")
    end = time.monotonic() + BACK_S
    while free_bytes(folder) < before // 2:
        assert time.monotonic() < end, "it stays full"
        time.sleep(0.2)
    ioshape.save(checkpoint(3, 128 * MIB), path)
    assert number_loaded(path) == 3
