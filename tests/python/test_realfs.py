# SPDX-License-Identifier: Apache-2.0
"""Small clusters of real parallel filesystems that run on this host."""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import ioshape
import pytest
import torch
from checkpoints import left_clean
from ioshape._settings import config

MIB = 1 << 20
TESTBED = Path(__file__).parent.parent / "testbed"
PROGRAMS = {"ceph": "ceph-fuse", "gluster": "glusterd"}


def unavailable() -> str:
    if os.geteuid():
        return "starting clusters takes root"
    missing = [program for program in PROGRAMS.values() if not shutil.which(program)]
    return f"not installed: {', '.join(missing)}" if missing else ""


pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


def order(name: str, *words: str | Path) -> str:
    return subprocess.run(
        [TESTBED / f"{name}.sh", *words], check=True, capture_output=True, text=True, timeout=600
    ).stdout


class Cluster:
    """A filesystem with two clients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"ioshape-{name}-", dir="/var/tmp"))
        try:
            self.path = Path(order(name, "up", self.folder).strip())
            self.other = self.folder / "other"
            order(name, "mount", self.folder, self.other)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        order(self.name, "down", self.folder)


@pytest.fixture(scope="module", params=PROGRAMS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    try:
        yield made
    finally:
        made.end()


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
    cluster: Cluster, direct: Literal["prefer", "require", "off"]
) -> None:
    ioshape.configure(direct=direct, unchanged="ignore")
    ioshape.save(state(1), cluster.path / f"{direct}.pt")
    ioshape.save(state(2), cluster.path / f"{direct}.pt")  # takes its place
    assert_is(ioshape.load(cluster.other / f"{direct}.pt"), 2)
    assert_is(torch.load(cluster.other / f"{direct}.pt"), 2)
    assert not list(cluster.other.glob(".*ioshape-tmp*"))


def test_defaults_take_no_downgrade_of_direct_io(cluster: Cluster) -> None:
    report = ioshape.save(state(1), cluster.path / "defaults.pt")
    assert not [step for step in report.fallbacks if step.code == "direct"]
    assert report.direct == (cluster.name == "gluster")


def test_background_saves_streams_and_groups(cluster: Cluster) -> None:
    ioshape.save_async(state(3), cluster.path / "background.pt").wait()
    assert_is(ioshape.load(cluster.other / "background.pt"), 3)
    whole = io.BytesIO()
    torch.save(state(4), whole)
    with ioshape.open(cluster.path / "stream.pt", "wb") as file:
        file.write(whole.getvalue())
    assert_is(torch.load(cluster.other / "stream.pt"), 4)
    ioshape.save_group(state(5), cluster.path / "run", step=5)
    assert_is(ioshape.load_group(cluster.other / "run"), 5)


def test_a_pool_is_named_after_the_cluster(cluster: Cluster) -> None:
    """Both clients are in one pool, and another cluster is in another one."""
    names = {ioshape.probe(path).pool for path in (cluster.path, cluster.other)}
    (name,) = names
    if cluster.name == "ceph":
        configuration = (cluster.folder / "ceph.conf").read_text(encoding="ascii")
        (fsid,) = [
            line.split(" = ")[1] for line in configuration.splitlines() if line.startswith("fsid")
        ]
        assert name == f"ceph:{fsid}"
    else:
        assert name.startswith("fuse.glusterfs:")


def test_doctor_finds_no_lack_of_inodes(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ioshape", "doctor", cluster.path, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    told = json.loads(done.stdout)
    assert "inodes" not in json.dumps(told["findings"])
