# SPDX-License-Identifier: Apache-2.0
"""Layouts on a filesystem with stripes: requests, results, reports and effects."""

import logging
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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

#: An object whose file is larger than the smallest file for which ioshape requests a layout.
OBJECT = {"weights": torch.arange(3 * MIB // 8)}


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    with left_clean():
        yield
        monkeypatch.undo()


@pytest.fixture(scope="module")
def lustre(_mounts_of_stripefs: None) -> Iterator[Mount]:
    """Yield a mount with eight targets, whose files have one stripe by default."""
    with striped("ssd", pool=["flash=4,5,6,7"], **QUICK) as mount:
        yield mount


class Part(NamedTuple):
    """A component of lustre.lov."""

    end: int
    size: int
    stripes: int
    pool: str


def layout_of(path: Path) -> list[Part]:
    """Return the components of a file, parsed without ioshape."""
    blob = os.getxattr(path, "lustre.lov")
    (magic,) = struct.unpack_from("<I", blob)
    if magic != 0x0BD60BD0:
        return [_part(blob, 0, 2**64 - 1)]
    (count,) = struct.unpack_from("<H", blob, 14)
    parts = []
    for entry in range(32, 32 + 48 * count, 48):
        end, offset = struct.unpack_from("<QI", blob, entry + 16)
        parts.append(_part(blob, offset, end))
    return parts


def _part(blob: bytes, at: int, end: int) -> Part:
    magic, size, count = struct.unpack_from("<I20xIH", blob, at)
    pool = blob[at + 32 : at + 48].rstrip(b"\0").decode() if magic == 0x0BD30BD0 else ""
    return Part(end, size, count, pool)


@pytest.fixture
def writers(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """Return a function that reads from the log how many writers the newest save's pool admits."""
    caplog.set_level(logging.DEBUG, logger="ioshape")
    return lambda: int(re.findall(r", slot [0-9]+ of pool .*, capacity ([0-9]+)", caplog.text)[-1])


def save(path: Path, wish: str = "auto", **settings: Any) -> ioshape.Report:
    """Save OBJECT with a requested layout, and check that only this file was created."""
    ioshape.configure(layout=wish, **settings)
    before = set(path.parent.iterdir())
    report = ioshape.save(OBJECT, path)
    assert set(path.parent.iterdir()) == before | {path}
    assert torch.equal(torch.load(path)["weights"], OBJECT["weights"])
    return report


# ---- Layouts that are granted --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "parts", "words"),
    [
        ("stripe_count=4,stripe_size=4M", [Part(2**64 - 1, 4 * MIB, 4, "")], "4 x 4M"),
        ("stripe_count=2", [Part(2**64 - 1, MIB, 2, "")], "2 x 1M"),
        ("stripe_size=64K", [Part(2**64 - 1, MIB // 16, 1, "")], "1 x 64K"),
        ("stripe_count=4,pool=flash", [Part(2**64 - 1, MIB, 4, "flash")], "4 x 1M, pool flash"),
    ],
)
def test_a_file_lies_as_it_was_asked_for(
    lustre: Mount, wish: str, parts: list[Part], words: str
) -> None:
    report = save(lustre.path / "file.pt", wish)
    assert layout_of(lustre.path / "file.pt") == parts
    assert report.stripes == words
    assert not report.downgrades


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_all_targets_are_as_many_as_there_are() -> None:
    """Check a layout of so many stripes that the usual buffer is too small for it."""
    with striped("ssd", targets=256, **QUICK) as mount:
        assert save(mount.path / "file.pt", "stripe_count=all").stripes == "256 x 1M"


def test_a_pool_of_targets_has_slots_of_its_own(lustre: Mount) -> None:
    folder = lustre.path / "pooled"
    folder.mkdir()
    layout = struct.pack("=II16xIHH16s", 0x0BD30BD0, 1, MIB, 2, 0xFFFF, b"flash")
    os.setxattr(folder, "lustre.lov", layout)
    pool = ioshape.probe(lustre.path / "model.pt").pool
    assert ioshape.probe(folder / "model.pt").pool == f"{pool}.flash"


def test_nothing_is_asked_for_where_the_directory_is_wide_enough(lustre: Mount) -> None:
    for wish in ("auto", "directory"):
        lustre.reset()
        report = save(lustre.path / f"{wish}.pt", wish)
        assert report.stripes == "1 x 1M"
        # ioctl reads the targets for the capacity, for the layout rule and with their free space.
        assert lustre.statistics()["metadata"].get("ioctl", 0) <= 3
        assert not lustre.statistics()["metadata"].get("setxattr", 0)


def test_a_new_file_does_not_inherit_from_the_one_it_replaces(lustre: Mount) -> None:
    path = lustre.path / "file.pt"
    save(path, "stripe_count=4")
    path.chmod(0o640)
    assert save(path, "stripe_count=2").stripes == "2 x 1M"
    assert save(path, "directory").stripes == "1 x 1M"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_mode_is_as_open_would_have_given(lustre: Mount) -> None:
    old = os.umask(0o027)
    try:
        save(lustre.path / "masked.pt", "stripe_count=4")
    finally:
        os.umask(old)
    assert (lustre.path / "masked.pt").stat().st_mode & 0o777 == 0o640
    (lustre.path / "masked.pt").unlink()


def test_the_lane_of_another_filesystem_asks_as_well(lustre: Mount, tmp_path: Path) -> None:
    """Check that the queue of an earlier file on another filesystem does not affect the layout."""
    (lustre.path / "mode.pt").touch(0o600)
    ioshape.configure(layout="stripe_count=4")
    for name in ("file.pt", "mode.pt"):
        assert ioshape.save(OBJECT, tmp_path / name).stripes == ""
        assert ioshape.save(OBJECT, lustre.path / name).stripes == "4 x 1M"
    assert (lustre.path / "mode.pt").stat().st_mode & 0o777 == 0o600
    assert not [path for path in lustre.path.iterdir() if path.name.startswith(".")]
    (lustre.path / "mode.pt").unlink()


# ---- Layouts that are not granted ----------------------------------------------------------------


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_an_unknown_pool_that_is_refused_leaves_the_directorys_layout() -> None:
    with striped("ssd", trap=["pool-refused"], **QUICK) as mount:
        path = mount.path / "file.pt"
        report = save(path, "stripe_count=4,pool=nowhere")
        assert layout_of(path) == [Part(2**64 - 1, MIB, 1, "")]
        assert report.stripes == "1 x 1M"
        assert [step.code for step in report.downgrades] == ["layout"]


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_a_server_that_says_yes_and_does_nothing() -> None:
    with striped("ssd", trap=["setstripe-ignored"], **QUICK) as mount:
        report = save(mount.path / "file.pt", "stripe_count=4")
        assert layout_of(mount.path / "file.pt") == [Part(2**64 - 1, MIB, 1, "")]
        assert report.stripes == "1 x 1M"
        assert [step.code for step in report.downgrades] == ["layout"]


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_a_directory_without_a_layout(writers: Callable[[], int]) -> None:
    with striped("ssd", trap=["no-default"], **QUICK) as mount:
        path = mount.path / "file.pt"
        assert save(path).stripes == "1 x 1M"
        # The first file has revealed the layout of new files.
        ioshape.save(OBJECT, path)
        assert writers() == 8
        assert save(path, "stripe_count=4").stripes == "4 x 1M"


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_who_tells_nothing_is_asked_nothing(writers: Callable[[], int]) -> None:
    with striped("ssd", trap=["no-layout"], **QUICK) as mount:
        report = save(mount.path / "file.pt", "stripe_count=4")
        assert (report.stripes, report.downgrades) == ("", ())
        # Eight writers each have a request in flight, and more only while no request waits.
        assert writers() == 8


# ---- Other filesystems ---------------------------------------------------------------------------


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_beegfs() -> None:
    with striped("ssd", play="beegfs", **QUICK) as mount:
        report = save(mount.path / "file.pt", "stripe_count=4,stripe_size=1M")
        assert report.stripes == "4 x 1M"
        assert not report.downgrades
        # BeeGFS accepts only powers of two.
        report = save(mount.path / "file.pt", "stripe_count=4,stripe_size=192K")
        assert report.stripes == "1 x 1M"
        assert [step.code for step in report.downgrades] == ["layout"]
        report = save(mount.path / "file.pt", "stripe_count=100")
        assert report.stripes == "8 x 1M"
        assert len(report.downgrades) == 1


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_ceph_is_not_asked() -> None:
    with striped("ssd", play="ceph", **QUICK) as mount:
        # Without a layout of its own, the directory does not reveal Ceph, because no kernel client
        # serves it.
        text = b"stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs_data"
        os.setxattr(mount.path, "ceph.dir.layout", text)
        report = save(mount.path / "file.pt", "stripe_count=4,stripe_size=1M")
        assert report.stripes == "1 x 4M, pool cephfs_data"
        assert not report.downgrades


# ---- The setting ---------------------------------------------------------------------------------


def test_a_mistake_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        save(tmp_path / "file.pt", "stripe_count=0")
    assert not list(tmp_path.iterdir())


@pytest.mark.wording
def test_a_mistake_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IOSHAPE_LAYOUT", "stripe_cont=3")
    with pytest.raises(
        ValueError, match=r'^IOSHAPE_LAYOUT: cannot use the layout "stripe_cont=3": '
    ):
        ioshape.save([1], tmp_path / "a.pt")
