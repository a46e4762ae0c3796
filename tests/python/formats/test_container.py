# SPDX-License-Identifier: Apache-2.0
"""The zip around the records: other tools read our layout, and our reader reads theirs."""

import io
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from ioshape._core.errors import StorageError
from ioshape._load.reader import Reader
from torch.utils import serialization
from tree import build_folder, program

# Typed as Any because the stubs of config modules and readers lack attributes.
CONFIG: Any = serialization.config

# The records that a torch zip needs besides its data.
BASICS = ("data.pkl=.", "byteorder=little", "version=3")

# Records below, at and above 4 GiB, of known and unknown length, and headers beyond 4 GiB. No
# record has exactly 2^32 - 1 bytes: Info-ZIP 6.0 confuses that size with the mark of a zip64 field.
HUGE = (
    "data/0:4294967294",
    "data/1:4294967296",
    "data/2:100",
    "data/3:100:unknown",
    "data/4:5000000000:unknown",
    "data/5:8:4096",
)


def write(path: Path, *records: str) -> None:
    """Write a torch zip with the library."""
    subprocess.run(
        (build_folder() / "tests" / "c" / "container", "zip", path, *records),
        stdout=subprocess.DEVNULL,
        check=True,
    )


def verify(path: Path) -> None:
    with Reader(str(path)) as reader:
        reader.verify()


def refused(path: Path) -> str:
    """Return the library's error message for a file that it refuses."""
    with pytest.raises(StorageError) as error:
        Reader(str(path))
    return str(error.value)


def listed(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, offset of the data and checksum of each record, as our reader sees them."""
    with Reader(str(path)) as reader:
        return {one.name: (one.n_bytes, one.file_offset, one.crc32) for one in reader.records()}


def unzip(*arguments: str | Path) -> str:
    """Return the output of unzip. Any warning fails the test."""
    result = subprocess.run(
        (program("unzip"), *arguments), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


def assert_seen_alike(path: Path) -> None:
    """Check that Python, torch and our reader agree about names, sizes, checksums and offsets."""
    ours = listed(path)
    torchs: Any = torch._C.PyTorchFileReader(str(path))
    with zipfile.ZipFile(path) as archive:
        pythons = {info.filename.split("/", 1)[1]: info for info in archive.infolist()}
        # Our reader does not list the index that our writer adds.
        names = [
            name for name, info in pythons.items() if not info.is_dir() and name != ".ioshape/index"
        ]
        assert list(ours) == names
        for name, (size, offset, crc) in ours.items():
            assert (pythons[name].file_size, pythons[name].CRC) == (size, crc), name
            assert torchs.get_record_offset(name) == offset, name
        # Torch lists folders as records, too.
        assert set(names) <= set(torchs.get_all_records())


# ---- Our layout, read by others ------------------------------------------------------------------


def test_small_archives_are_read_by_all(tmp_path: Path) -> None:
    path = tmp_path / "small.pt"
    write(path, *BASICS, "data/0:1000000", "data/1:1000000:unknown", "data/2:0", "data/3:1:1")
    assert_seen_alike(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/byteorder") == b"little"
    assert "No errors detected" in unzip("-t", path)
    assert torch._C.PyTorchFileReader(str(path)).get_record("data/1") == bytes(1000000)
    verify(path)


def test_zip_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "small.zip"
    write(path, *BASICS, "data/0:1000:4096", "data/1:1000:unknown")
    subprocess.run((program("zip"), "-T", path), check=True, capture_output=True)
    assert not re.search(r"warning|error|caution", unzip("-Zv", path), re.IGNORECASE)


@pytest.mark.long
@pytest.mark.parametrize("count", [65530, 65535, 65536, 200000])
def test_many_records_are_read_by_all(tmp_path: Path, count: int) -> None:
    path = tmp_path / "many.pt"
    write(path, *BASICS, f"data/*{count - len(BASICS) - 1}:8")
    assert len(listed(path)) == count - 1
    assert_seen_alike(path)
    assert unzip("-Z1", path).count("\n") == count


def test_huge_archives_are_laid_out_for_all(tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    write(path, *BASICS, *HUGE)
    assert path.stat().st_size > 12 * 2**30
    assert_seen_alike(path)
    reader = torch._C.PyTorchFileReader(str(path))
    assert reader.get_record("data/3") == bytes(100)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/5") == bytes(8)
    listing = unzip("-l", path)
    for record in HUGE:
        name, size = record.split(":")[:2]
        assert re.search(rf"^ *{size} .* archive/{name}$", listing, re.MULTILINE), listing


@pytest.mark.long
def test_huge_archives_pass_every_check(tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    write(path, *BASICS, *HUGE[1:])  # 9 GB
    verify(path)
    assert "No errors detected" in unzip("-t", path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


# ---- Files of others, read by us -----------------------------------------------------------------


def state() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(100000.0).reshape(100, 1000),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3),
    }


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
@pytest.mark.parametrize("name", ["model.pt", "0", "gewichte ü.tar.pt", "x" * 250])
def test_files_of_torch_are_read(tmp_path: Path, name: str, alignment: int) -> None:
    path = tmp_path / name
    with CONFIG.patch("save.storage_alignment", alignment):
        torch.save(state(), path)
    assert_seen_alike(path)
    verify(path)


def test_streams_of_torch_are_read(tmp_path: Path) -> None:
    path = tmp_path / "stream.pt"
    stream = io.BytesIO()
    torch.save(state(), stream)
    path.write_bytes(stream.getvalue())
    assert_seen_alike(path)
    verify(path)


def test_saves_without_checksums_are_read(tmp_path: Path) -> None:
    """Check that such files can be read: their checksums are wrong, but their offsets are right."""
    path = tmp_path / "unchecked.pt"
    with CONFIG.patch("save.compute_crc32", False):
        torch.save(state(), path)
    assert listed(path)["data/0"][0] == 400000
    assert torch.equal(ioshape.load(path)["weight"], state()["weight"])


def stored(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    for name in source.namelist():
        target.writestr(name, source.read(name))


def stored_as_zip64(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    for name in source.namelist():
        with target.open(name, "w", force_zip64=True) as record:
            record.write(source.read(name))


def stored_with_folders(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    folder = source.namelist()[0].split("/")[0]
    target.writestr(f"{folder}/", b"")
    target.writestr(f"{folder}/data/", b"")
    stored(source, target)


def stored_with_comment(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    stored(source, target)
    target.comment = b"c" * 65535


def stored_backwards(source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
    for name in reversed(source.namelist()):
        target.writestr(name, source.read(name))


Repack = Callable[[zipfile.ZipFile, zipfile.ZipFile], None]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "repack",
    [stored, stored_as_zip64, stored_with_folders, stored_with_comment, stored_backwards],
)
def test_repacked_files_are_read(tmp_path: Path, repack: Repack, streamed: bool) -> None:
    class Pipe(io.BytesIO):
        """A stream on which zipfile writes data descriptors, because it cannot seek."""

        def seekable(self) -> bool:
            return not streamed

        def tell(self) -> int:
            if streamed:
                raise io.UnsupportedOperation
            return super().tell()

    original, path, stream = tmp_path / "original.pt", tmp_path / "repacked.pt", Pipe()
    torch.save(state(), original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(stream, "w") as target:
        repack(source, target)
    path.write_bytes(stream.getvalue())
    assert_seen_alike(path)
    verify(path)
    before = {name: row[::2] for name, row in listed(original).items()}
    assert {name: row[::2] for name, row in listed(path).items()} == before


def test_what_the_zip_program_stores_is_read(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "original.pt")
    with zipfile.ZipFile(tmp_path / "original.pt") as source:
        source.extractall(tmp_path / "unpacked")
    command = (program("zip"), "-0", "-q", "-r", tmp_path / "repacked.pt", "original")
    subprocess.run(command, check=True, cwd=tmp_path / "unpacked")
    before, after = listed(tmp_path / "original.pt"), listed(tmp_path / "repacked.pt")
    assert {name: row[::2] for name, row in after.items()} == {
        name: row[::2] for name, row in before.items()
    }
    verify(tmp_path / "repacked.pt")


# ---- Files that we refuse ------------------------------------------------------------------------


def test_compressed_archives_are_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "deflated.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    assert "compressed" in refused(path)
    assert "zip -0" in refused(path)


def test_old_files_of_torch_are_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save(state(), path, _use_new_zipfile_serialization=False)
    assert "before torch 1.6" in refused(path)


@pytest.mark.parametrize("left", [0, 1, 3, 4, 100, 1000, -1, -21, -22, -23, -98, -99])
def test_truncated_files_are_called_so(tmp_path: Path, left: int) -> None:
    path = tmp_path / "truncated.pt"
    torch.save(state(), path)
    path.write_bytes(path.read_bytes()[:left] if left else b"")
    assert "truncated" in refused(path)
