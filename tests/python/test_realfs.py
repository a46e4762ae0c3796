# SPDX-License-Identifier: Apache-2.0
"""Small clusters of real parallel filesystems that run on this host."""

import io
import json
import os
import re
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

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


@dataclass(frozen=True)
class Mounted:
    """A cluster with two clients."""

    kind: str
    path: Path
    other: Path


@pytest.fixture(scope="module", params=PROGRAMS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Mounted]:
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
    assert report.direct == (cluster.kind == "glusterfs")


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
    if cluster.kind == "cephfs":
        configuration = (cluster.path.parent / "ceph.conf").read_text(encoding="ascii")
        (fsid,) = [
            line.split(" = ")[1] for line in configuration.splitlines() if line.startswith("fsid")
        ]
        assert name == f"ceph:{fsid}"
    else:
        begins = {"glusterfs": "fuse.glusterfs:", "moosefs": "fuse:mfs_"}
        assert name.startswith(begins[cluster.kind])


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


def test_bench_compares_two_tenants(cluster: Mounted) -> None:
    """The verdict is printed, and each side has saved in its way."""
    before = sorted(path.name for path in cluster.path.iterdir())
    told = bench(cluster.path)
    assert re.search(r"^without slots .*\nwith slots .*\n", told, re.MULTILINE)
    assert re.search(
        r"^With slots your neighbours wait \S+ m?s instead of \S+ m?s; "
        r"your checkpoint takes \S+ m?s instead of \S+ m?s\.$",
        told,
        re.MULTILINE,
    )
    found = json.loads(bench(cluster.path, "--json"))
    reports = {way: one["report"] for way, one in found["ways"].items()}
    assert {way: one["coordinator"] for way, one in reports.items()} == {
        "open": "open",
        "async": "local",
    }
    assert reports["async"]["pool"] == ioshape.probe(cluster.path).pool
    verdict = found["verdict"]
    without, with_slots = verdict["without"], verdict["with_slots"]
    assert verdict["aggregate"] == with_slots["bytes_per_s"] / without["bytes_per_s"]
    assert verdict["p99"] == without["operations"]["p99_ms"] / with_slots["operations"]["p99_ms"]
    # Nothing is left on the filesystem, as another client sees it.
    assert sorted(path.name for path in cluster.other.iterdir()) == before


def bench(path: Path, *options: str) -> str:
    small = ["--tenants", "2", "--ranks", "2", "--size", "20M", "--rounds", "1"]
    return subprocess.run(
        [sys.executable, "-m", "ioshape", "bench", path, *small, *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    ).stdout


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
