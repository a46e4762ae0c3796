# SPDX-License-Identifier: Apache-2.0
"""Shard files are zips of whole checkpoints, which standard zip tools and torch can read."""

import re
import subprocess
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ioshape._core.errors import DamagedError, StorageError
from ioshape._load.reader import Reader
from tree import build_folder, program

# Sizes of members around 4 GiB, so that later headers lie beyond 4 GiB. No member has exactly 2^32
# - 1 bytes: Info-ZIP 6.0 confuses that size with the mark of a zip64 field.
HUGE = {"a": 4294967294, "b": 4294967296, "c": 5000000000, "d": 1}


class Member(NamedTuple):
    n_bytes: int
    offset: int
    crc32: int


def bundle(path: Path, alignment: int, *members: str | Path) -> dict[str, Member]:
    """Write a bundle with the library, and return what it reports about the members."""
    command = (
        build_folder() / "tests" / "c" / "container",
        "bundle",
        path,
        str(alignment),
        *members,
    )
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    return {name: Member(int(size), int(offset), int(crc)) for name, size, offset, crc in rows}


def unzip(*arguments: str | Path) -> str:
    """Return the output of unzip. Any warning fails the test."""
    result = subprocess.run(
        (program("unzip"), *arguments), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


def assert_seen_alike(path: Path, members: dict[str, Member], alignment: int) -> None:
    """Check that Python's zipfile finds the same members where the library reports them."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        infos = archive.infolist()
        assert [info.filename for info in infos] == list(members)
        for info in infos:
            member = members[info.filename]
            assert member.offset % alignment == 0
            assert (info.file_size, info.CRC) == (member.n_bytes, member.crc32)
            # The local header must end exactly where the data begins.
            file.seek(info.header_offset)
            header = file.read(member.offset - info.header_offset)
            assert header[:4] == b"PK\3\4"
            assert int.from_bytes(header[26:28], "little") == len(info.filename)
            extra = int.from_bytes(header[28:30], "little")
            assert len(header) == 30 + len(info.filename) + extra


def state(rank: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(100000.0) + rank, "empty": torch.zeros(0)}


def ranks(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"rank-{rank:05}.pt" for rank in range(count)]
    for rank, path in enumerate(paths):
        torch.save(state(rank), path)
    return paths


@pytest.mark.parametrize("alignment", [4096, 12288, 65536, 1 << 20, 3 << 20])
def test_members_are_checkpoints_of_torch(tmp_path: Path, alignment: int) -> None:
    files = ranks(tmp_path, 4)
    path = tmp_path / "ranks.zip"
    members = bundle(path, alignment, *(f"{file.name}@{file}" for file in files))
    assert len(members) == 4
    assert_seen_alike(path, members, alignment)
    assert "No errors detected" in unzip("-t", path)
    unzip("-q", path, "-d", tmp_path / "unpacked")
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for rank, file in enumerate(files):
            whole = file.read_bytes()
            member = members[file.name]
            assert content[member.offset :][: member.n_bytes] == whole
            assert member.crc32 == zlib.crc32(whole)
            unpacked = tmp_path / "unpacked" / file.name
            assert unpacked.read_bytes() == whole
            with archive.open(file.name) as stream:
                loaded = [
                    torch.load(unpacked, weights_only=True),
                    torch.load(unpacked, weights_only=True, mmap=True),
                    torch.load(stream, weights_only=True),
                ]
            for again in loaded:
                assert again.keys() == state(rank).keys()
                assert torch.equal(again["weight"], state(rank)["weight"])


def test_what_lies_between_members_is_zeros(tmp_path: Path) -> None:
    path = tmp_path / "ranks.zip"
    members = bundle(path, 1 << 20, "first:100", "second:0", "third:2000000")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        infos, directory = archive.infolist(), archive.start_dir
    end = 0
    for info in infos:
        member = members[info.filename]
        assert not any(content[end : info.header_offset])
        end = member.offset + member.n_bytes
        assert content[end : end + 4] == b"PK\7\x08"
        end += 24
    assert end == directory


def test_zip_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "ranks.zip"
    bundle(path, 3 << 20, "first:100", "second:0", "third:2000000")
    subprocess.run((program("zip"), "-T", path), check=True, capture_output=True)
    assert not re.search(r"warning|error|caution", unzip("-Zv", path), re.IGNORECASE)


@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("n_bytes", [0, 5000])
def test_one_member_or_many_are_read_by_all(tmp_path: Path, count: int, n_bytes: int) -> None:
    path = tmp_path / "ranks.zip"
    members = bundle(path, 8192, f"rank-*{count}:{n_bytes}")
    assert list(members) == [f"rank-{rank}" for rank in range(count)]
    assert_seen_alike(path, members, 8192)
    assert unzip("-t", path).count(" OK\n") == count


def test_huge_members_are_laid_out_for_all(tmp_path: Path) -> None:
    path = tmp_path / "ranks.zip"
    members = bundle(path, 3 << 20, *(f"{name}:{size}" for name, size in HUGE.items()))
    assert {name: member.n_bytes for name, member in members.items()} == HUGE
    assert_seen_alike(path, members, 3 << 20)
    listing = unzip("-l", path)
    for name, size in HUGE.items():
        assert re.search(rf"^ *{size} .* {name}$", listing, re.MULTILINE), listing
    with zipfile.ZipFile(path) as archive:
        assert archive.read("d") == b"\0"


@pytest.mark.long
def test_huge_bundles_pass_every_check(tmp_path: Path) -> None:
    path = tmp_path / "ranks.zip"
    bundle(path, 3 << 20, *(f"{name}:{size}" for name, size in HUGE.items() if name != "a"))
    assert "No errors detected" in unzip("-t", path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


# ---- Reads of one member -------------------------------------------------------------------------


def test_a_member_is_read_as_if_it_were_a_file(tmp_path: Path) -> None:
    files = ranks(tmp_path, 3)
    path = tmp_path / "ranks.zip"
    members = bundle(path, 12288, *(f"{file.name}@{file}" for file in files))
    for file in files:
        _, offset, _ = member = members[file.name]
        whole = bytearray(member.n_bytes)
        with (
            Reader(str(file)) as alone,
            Reader(str(path), part=(offset, member.n_bytes)) as inside,
        ):
            assert inside.file_bytes == member.n_bytes
            assert inside.records() == alone.records()
            inside.verify()
            inside.read_file(0, memoryview(whole))
            with pytest.raises(StorageError):
                inside.read_file(1, memoryview(whole))
        assert whole == file.read_bytes()


def test_damage_next_door_is_no_concern(tmp_path: Path) -> None:
    files = ranks(tmp_path, 3)
    path = tmp_path / "ranks.zip"
    members = bundle(path, 4096, *(f"{file.name}@{file}" for file in files))
    content = bytearray(path.read_bytes())
    before, middle, behind = members.values()
    for member in (before, behind):
        content[member.offset : member.offset + member.n_bytes] = bytes(member.n_bytes)
    path.write_bytes(content)
    with Reader(str(path), part=(middle.offset, middle.n_bytes)) as reader:
        reader.verify()
    content[middle.offset + middle.n_bytes // 2] ^= 1
    path.write_bytes(content)
    with (
        Reader(str(path), part=(middle.offset, middle.n_bytes)) as reader,
        pytest.raises(DamagedError) as damaged,
    ):
        reader.verify()
    assert damaged.value.record == "data/0"


def test_a_part_that_leaves_the_file_is_damage(tmp_path: Path) -> None:
    (file,) = ranks(tmp_path, 1)
    n_bytes = file.stat().st_size
    with pytest.raises(DamagedError):
        Reader(str(file), part=(4096, n_bytes))
