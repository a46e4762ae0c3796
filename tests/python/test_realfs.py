# SPDX-License-Identifier: Apache-2.0
"""Small clusters of real parallel filesystems that run on this host."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ioshape
import pytest
import torch
from checkpoints import left_clean
from clusters import PROGRAMS, ClusterError, running, unavailable
from ioshape._settings import config

MIB = 1 << 20

#: KIND:PATH:OTHER, where a filesystem is mounted twice; then no cluster is started.
MOUNTED = os.environ.get("IOSHAPE_TEST_MOUNTED", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not MOUNTED and bool(unavailable()), reason=unavailable()),
]


@dataclass(frozen=True)
class Mounted:
    """A cluster with two clients."""

    kind: str
    path: Path
    other: Path


@pytest.fixture(scope="module", params=[MOUNTED.split(":")[0]] if MOUNTED else PROGRAMS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    if MOUNTED:
        kind, *points = MOUNTED.split(":")
        yield Mounted(kind, *map(Path, points))
        return
    with running(request.param) as made, made.client() as other:
        yield Mounted(made.kind, made.path, other)


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    with left_clean():
        # A context of its own: the kernel gives the numbers of mounts that are gone to others.
        ioshape.configure(job="realfs")
        yield
        monkeypatch.undo()


def state(seed: int) -> dict[str, torch.Tensor]:
    """Several blocks, and a length that is no multiple of a page."""
    generator = torch.Generator().manual_seed(seed)
    return {"weights": torch.rand((33 * MIB + 100) // 4, generator=generator)}


def assert_is(loaded: dict[str, torch.Tensor], seed: int) -> None:
    assert torch.equal(loaded["weights"], state(seed)["weights"])


@pytest.mark.parametrize("direct", ["prefer", "require", "off"])
def test_another_client_loads_what_was_saved(
    cluster: Mounted, direct: Literal["prefer", "require", "off"]
) -> None:
    ioshape.configure(direct=direct, unchanged="ignore")
    ioshape.save(state(1), cluster.path / f"{direct}.pt")
    ioshape.save(state(2), cluster.path / f"{direct}.pt")  # takes its place
    assert_is(ioshape.load(cluster.other / f"{direct}.pt"), 2)
    assert_is(torch.load(cluster.other / f"{direct}.pt"), 2)
    assert not list(cluster.other.glob(".*ioshape-tmp*"))


def test_defaults_take_no_downgrade_of_direct_io(cluster: Mounted) -> None:
    report = ioshape.save(state(1), cluster.path / "defaults.pt")
    assert not [step for step in report.fallbacks if step.code == "direct"]
    assert report.direct == (cluster.kind not in {"cephfs", "moosefs"})


def test_background_saves_streams_and_groups(cluster: Mounted) -> None:
    ioshape.save_async(state(3), cluster.path / "background.pt").wait()
    assert_is(ioshape.load(cluster.other / "background.pt"), 3)
    whole = io.BytesIO()
    torch.save(state(4), whole)
    with ioshape.open(cluster.path / "stream.pt", "wb") as file:
        file.write(whole.getvalue())
    assert_is(torch.load(cluster.other / "stream.pt"), 4)
    ioshape.save_group(state(5), cluster.path / "run", step=5)
    assert_is(ioshape.load_group(cluster.other / "run"), 5)


def test_a_pool_is_named_after_the_cluster(cluster: Mounted) -> None:
    """Both clients are in one pool, and another cluster is in another one."""
    names = {ioshape.probe(path).pool for path in (cluster.path, cluster.other)}
    (name,) = names
    if cluster.kind in {"cephfs", "ceph"}:
        configuration = (cluster.path.parent / "ceph.conf").read_text(encoding="ascii")
        (fsid,) = [
            line.split(" = ")[1] for line in configuration.splitlines() if line.startswith("fsid")
        ]
        assert name == f"ceph:{fsid}"
    else:
        begins = {"glusterfs": "fuse.glusterfs:", "moosefs": "fuse:mfs_"}
        assert name.startswith(begins.get(cluster.kind, "nfs:10.77.0.1:/"))


def test_doctor_finds_no_lack_of_inodes(cluster: Mounted) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ioshape", "doctor", cluster.path, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    told = json.loads(done.stdout)
    assert "inodes" not in json.dumps(told["findings"])


@pytest.mark.skipif(bool(MOUNTED), reason="starts a cluster")
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
