# SPDX-License-Identifier: Apache-2.0
"""The filesystems that are written through the page cache, and direct writes that fail late."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import ioshape
import pytest
import torch
from checkpoints import left_clean
from ioshape._core import config
from striped import Mount, striped

MIB = 1 << 20

#: Parameters without delays, because these tests do not measure speed.
QUICK: dict[str, object] = {
    "bandwidth": "20G",
    "seek_ms": 0,
    "mds_latency_ms": 0,
    "mds_rate": 1_000_000,
}


def state(seed: int) -> dict[str, torch.Tensor]:
    """Return several blocks of data, whose length is no multiple of a page."""
    generator = torch.Generator().manual_seed(seed)
    return {"weights": torch.rand((9 * MIB + 100) // 4, generator=generator)}


def assert_is(loaded: dict[str, torch.Tensor], seed: int) -> None:
    assert torch.equal(loaded["weights"], state(seed)["weights"])


def assert_holds(path: Path, seed: int) -> None:
    """Check the content of a file with stock torch and with ioshape."""
    assert_is(torch.load(path), seed)
    assert_is(ioshape.load(path), seed)


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch, _mounts_of_stripefs: None) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    with left_clean():
        # A new context is needed: the kernel gives the numbers of old mounts to new ones.
        ioshape.configure(job="page-cache")
        yield
        monkeypatch.undo()


# ---- The rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", ["nfs", "ceph"])
def test_a_fuse_filesystem_is_written_through_the_page_cache_and_read_past_it(play: str) -> None:
    with striped("ssd", play=play, clients=2, **QUICK) as mount:
        path = mount.path / "model.pt"
        report = ioshape.save(state(1), path)
        assert not report.direct
        # Writes through the page cache are the rule here, not a downgrade.
        assert not [step for step in report.downgrades if step.code == "direct"]
        # The other client has no page of the file.
        assert_is(ioshape.load(mount.paths[1] / "model.pt"), 1)
        counted = mount.statistics()
        assert counted["writes"]["direct"] == 0
        assert counted["reads"]["direct"] > 0
        assert_holds(path, 1)


def test_ranks_of_a_host_read_a_fuse_filesystem_through_the_page_cache() -> None:
    with striped("ssd", play="ceph", clients=2, **QUICK) as mount:
        ioshape.save(state(1), mount.path / "model.pt")
        # The open file has claimed the file: other readers of this host use the page cache.
        with ioshape.open(mount.paths[1] / "model.pt", "rb") as file:
            assert_is(ioshape.load(mount.paths[1] / "model.pt"), 1)
            counted = mount.statistics()["reads"]
            assert counted["direct"] == 0
            assert counted["requests"] > 0
            assert_is(torch.load(file), 1)


def test_direct_io_that_is_required_is_used_on_fuse() -> None:
    with striped("ssd", play="ceph", clients=2, **QUICK) as mount:
        ioshape.configure(direct="require")
        assert ioshape.save(state(1), mount.path / "model.pt").direct
        assert_is(ioshape.load(mount.paths[1] / "model.pt"), 1)
        counted = mount.statistics()
        assert counted["writes"]["direct"] > 0
        assert counted["reads"]["direct"] > 0


def test_a_daemon_that_passes_requests_to_lustre_is_written_directly() -> None:
    with striped("ssd", play="lustre", **QUICK) as mount:
        assert ioshape.save(state(1), mount.path / "model.pt").direct
        assert mount.statistics()["writes"]["direct"] > 0


# ---- Direct writes that are accepted and fail later ----------------------------------------------


@pytest.fixture
def late() -> Iterator[Mount]:
    """Yield a mount that accepts direct writes, loses them, and reports that at fsync."""
    with striped("ssd", play="lustre", direct="late", **QUICK) as mount:
        yield mount


def save(path: Path, seed: int) -> None:
    ioshape.save(state(seed), path)


def save_in_background(path: Path, seed: int) -> None:
    ioshape.save_async(state(seed), path).wait()


def write_as_stream(path: Path, seed: int) -> None:
    """Write a stream: the writer cannot get lost bytes again."""
    whole = io.BytesIO()
    torch.save(state(seed), whole)
    with ioshape.open(path, "wb") as file:
        file.write(whole.getvalue())


def save_in_place(path: Path, seed: int) -> None:
    """Save over an existing file."""
    torch.save(state(seed + 1), path)
    ioshape.save(state(seed), path)


@pytest.mark.parametrize(
    "write",
    [save, save_in_background, write_as_stream, save_in_place],
    ids=lambda one: one.__name__,
)
def test_no_save_fails_because_direct_io_fails_late(
    write: Callable[[Path, int], None], late: Mount
) -> None:
    for number in (1, 2):
        write(late.path / "model.pt", number)
        assert_holds(late.path / "model.pt", number)
    # The first attempt leaves no file.
    assert [path.name for path in late.path.iterdir()] == ["model.pt"]


def test_a_group_is_saved_where_direct_io_fails_late(late: Mount) -> None:
    ioshape.save_group(state(1), late.path / "run", step=1)
    assert_is(ioshape.load_group(late.path / "run"), 1)


def test_late_failures_are_reported_and_remembered(late: Mount) -> None:
    first = ioshape.save(state(1), late.path / "first.pt")
    tried = late.statistics()["writes"]["direct"]
    second = ioshape.save(state(2), late.path / "second.pt")
    assert tried > 0
    # The second file does not try direct writes.
    assert late.statistics()["writes"]["direct"] == tried
    for report, words in ((first, "accepts direct writes"), (second, "on an earlier file")):
        assert not report.direct
        (step,) = [step for step in report.downgrades if step.code == "direct"]
        assert words in step


def test_required_direct_io_that_fails_late_fails_the_save(late: Mount) -> None:
    path = late.path / "model.pt"
    torch.save(state(1), path)
    ioshape.configure(direct="require")
    with pytest.raises(ioshape.StorageError, match=r"model\.pt.*set direct=off"):
        ioshape.save(state(2), path)
    ioshape.configure(direct="off")
    assert_holds(path, 1)
    assert [one.name for one in late.path.iterdir()] == ["model.pt"]


def test_direct_io_that_works_is_proven_once() -> None:
    with striped("ssd", play="lustre", **QUICK) as mount:
        counts = []
        for number in (1, 2, 3):
            before = mount.statistics()["metadata"]["fsync"]
            ioshape.save(state(number), mount.path / "model.pt")
            counts.append(mount.statistics()["metadata"]["fsync"] - before)
        # The first save syncs the file, its directory, and once more to prove direct I/O.
        assert counts == [3, 2, 2]
