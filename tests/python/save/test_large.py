# SPDX-License-Identifier: Apache-2.0
"""Sizes beyond 32 and 16 bits: tensors over 4 GiB, and more storages than a plain zip can count."""

import struct
import zipfile
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from records import content_of, offset_of
from same import assert_same_description, describe
from stock import stock, torch_setting

MANY = 70_000  # more than 65,535
HUGE = 2**32 + 4096


def many() -> Any:
    values = torch.arange(MANY)
    return [values[i].clone() for i in range(MANY)]


def assert_zip64(path: Path, count: int) -> None:
    """Check that Python reads the directory and that the old end record points to zip64's."""
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == count
    end = path.read_bytes()[-22:] if path.stat().st_size < 2**31 else _tail(path, 22)
    signature, entries = struct.unpack_from("<I6xH", end)
    assert signature == 0x06054B50
    assert entries == min(count, 0xFFFF)


def _tail(path: Path, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-n_bytes, 2)
        return file.read()


@pytest.mark.long
def test_more_storages_than_a_plain_zip_can_count(tmp_path: Path) -> None:
    value = many()
    expected = describe(value)
    ioshape.save_async(value, tmp_path / "background.pt").wait()
    ioshape.save(value, tmp_path / "ours.pt")
    torch.save(value, tmp_path / "theirs.pt")
    assert (tmp_path / "background.pt").read_bytes() == (tmp_path / "ours.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "ours.pt") as archive:
        assert_zip64(tmp_path / "ours.pt", len(archive.namelist()))
    for way in ("safe", "mapped, checked by torch"):
        outcome = stock().load(tmp_path / "ours.pt", way)
        assert outcome.error is None
        assert_same_description(outcome.description, expected)
    assert_same_description(describe(ioshape.load(tmp_path / "ours.pt")), expected)
    assert_same_description(describe(ioshape.load(tmp_path / "theirs.pt")), expected)
    assert len(ioshape.inspect(tmp_path / "ours.pt").tensors) == MANY
    ioshape.verify(tmp_path / "ours.pt")


@pytest.fixture(scope="module")
def huge() -> Any:
    """Return a huge tensor between small ones, of which the last one has a large offset."""
    large = torch.arange(HUGE // 8)
    return {"before": torch.arange(5.0), "large": large, "end": large[-10:], "after": torch.ones(7)}


@pytest.fixture(scope="module")
def huge_description(huge: Any) -> Any:
    return describe(huge)


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_a_tensor_over_4_gib_of_ours(
    background: bool, huge: Any, huge_description: Any, tmp_path: Path
) -> None:
    path = tmp_path / "ours.pt"
    if background:
        ioshape.save_async(huge, path).wait()
    else:
        ioshape.save(huge, path)
    assert offset_of(path, "data/2") > HUGE
    assert content_of(path, "data/2") == struct.pack("<7f", *[1.0] * 7)
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    assert infos["data/1"].file_size == infos["data/1"].compress_size == HUGE
    assert infos["data/2"].header_offset > HUGE
    outcome = stock().load(path, "mapped, checked by torch")
    assert outcome.error is None
    assert_same_description(outcome.description, huge_description)
    assert_same_description(describe(ioshape.load(path)), huge_description)


@pytest.mark.long
def test_a_tensor_over_4_gib_of_theirs(huge: Any, huge_description: Any, tmp_path: Path) -> None:
    path = tmp_path / "theirs.pt"
    torch.save(huge, path)
    assert_same_description(describe(ioshape.load(path)), huge_description)
    with torch_setting("load.calculate_storage_offsets", True):
        assert_same_description(describe(ioshape.load(path, mmap=True)), huge_description)
    with path.open("r+b") as file:
        file.seek(offset_of(path, "data/1") + HUGE - 1)
        file.write(b"\xff")
    with pytest.raises(ioshape.DamagedError, match="'large'"):
        ioshape.load(path)
