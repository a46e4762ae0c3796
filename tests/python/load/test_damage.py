# SPDX-License-Identifier: Apache-2.0
"""ioshape.load finds all damage to a file: it returns what was saved, or it fails."""

import pickle
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
import zoo
from records import flip, offset_of
from same import assert_same, describe
from stock import torch_setting

LARGE = {
    "model": {
        "first": zoo.filled(torch.float32, 500_000),
        "second": zoo.filled(torch.int8, 70_000),
    },
    "list": [zoo.filled(torch.float64, 1000), {"deep": zoo.filled(torch.bfloat16, 3)}],
}


SMALL = {"a": torch.arange(50.0), "b": torch.ones(3, dtype=torch.int8), "n": [1, "x"]}


@pytest.mark.parametrize("write", [torch.save, ioshape.save])
@pytest.mark.parametrize(
    ("record", "at", "name"),
    [
        ("data/0", 0, "'model.first'"),
        ("data/0", 1_999_999, "'model.first'"),
        ("data/0", 1_048_576, "'model.first'"),
        ("data/1", 69_999, "'model.second'"),
        ("data/2", 4000, "'list[0]'"),
        ("data/3", 5, "'list[1].deep'"),
    ],
)
def test_damage_is_found_and_named(
    record: str, at: int, name: str, write: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    write(LARGE, path)
    flip(path, offset_of(path, record) + at, bit=3)
    readers: list[Callable[[Path], Any]] = [ioshape.load, ioshape.verify]
    for load in readers:
        with pytest.raises(ioshape.DamagedError) as raised:
            load(path)
        error = raised.value
        assert name in str(error)  # Python adds the name, because the library does not know tensors
        assert error.record == record
        assert error.filename == str(path)
        assert error.remedy
    torch.load(path)  # torch does not notice the damage
    assert describe(ioshape.load(path, verify=False)) == describe(torch.load(path))
    assert describe(ioshape.load(path, verify=False)) != describe(LARGE)


def test_damage_of_shared_storages_names_all_who_share(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    base = torch.arange(100.0)
    ioshape.save({name: base[i:] for i, name in enumerate("abcde")}, path)
    flip(path, offset_of(path, "data/0"))
    with pytest.raises(ioshape.DamagedError, match=r"'a', 'b', 'c' and 2 more"):
        ioshape.load(path)


def test_damage_in_a_state_dict_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters())
    ioshape.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, path)
    flip(path, offset_of(path, "data/1"))
    with pytest.raises(ioshape.DamagedError, match=r"'model\.0\.bias'"):
        ioshape.load(path)
    ioshape.save(torch.ones(5), path)
    flip(path, offset_of(path, "data/0"))
    with pytest.raises(ioshape.DamagedError, match="which holds the tensor;"):
        ioshape.load(path)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\2Nr\xff\xff\xff\0.",  # memoizes None as number 16777215
        b"\x80\5\x96\0\0\0\x10\0\0\0\0x.",  # a bytearray of 256 MiB
        b"\x80\4\x8e\0\0\0\x10\0\0\0\0x.",  # bytes of 256 MiB
    ],
)
def test_a_listing_takes_little_memory_whatever_the_pickle_says(
    pickled: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
    tracemalloc.start()
    ioshape.inspect(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


def test_verification_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(SMALL, path)
    flip(path, offset_of(path, "data/0"))
    with pytest.raises(ioshape.DamagedError):
        ioshape.load(path)
    ioshape.load(path, verify=False)


@pytest.fixture
def no_checksums() -> Iterator[None]:
    with torch_setting("save.compute_crc32", False):
        yield


@pytest.mark.usefixtures("no_checksums")
def test_files_without_checksums_are_loaded(tmp_path: Path) -> None:
    torch.save(LARGE, tmp_path / "model.pt")
    assert_same(ioshape.load(tmp_path / "model.pt"), LARGE)


def load_or_fail(path: Path) -> Any:
    """Return a description of what the file contains, or None if the load fails."""
    try:
        return describe(ioshape.load(path))
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
        assert str(error)  # noqa: PT017
        return None


WRITERS: dict[str, tuple[Callable[..., Any], int]] = {
    "ours": (ioshape.save, 1),
    "theirs": (torch.save, 3),
}


@pytest.mark.parametrize("whose", WRITERS)
@pytest.mark.slow
def test_no_flipped_bit_changes_what_is_loaded(whose: str, tmp_path: Path) -> None:
    write, step = WRITERS[whose]
    path = tmp_path / "model.pt"
    write(SMALL, path)
    places = [(offset, offset * 5 % 8) for offset in range(0, path.stat().st_size, step)]
    # Add all bits of the first central directory entry of a tensor, where a single bit can matter
    # most.
    entry = path.read_bytes().index(b"/data/0", path.read_bytes().index(b"PK\1\2")) - 60
    places += [(offset, bit) for offset in range(entry, entry + 60) for bit in range(8)]
    assert_no_flip_goes_through(path, places)


@pytest.mark.long
@pytest.mark.parametrize("whose", WRITERS)
def test_no_flipped_bit_at_all_changes_what_is_loaded(whose: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    WRITERS[whose][0](SMALL, path)
    size = path.stat().st_size
    assert_no_flip_goes_through(path, [(at, bit) for at in range(size) for bit in range(8)])


def assert_no_flip_goes_through(path: Path, places: list[tuple[int, int]]) -> None:
    content = path.read_bytes()
    expected = describe(SMALL)
    failures = 0
    wrong = []
    for offset, bit in places:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << bit
        path.write_bytes(damaged)
        found = load_or_fail(path)
        failures += found is None
        if found not in (None, expected):
            wrong.append((offset, bit, content[max(0, offset - 12) : offset + 4]))
    assert wrong == []
    assert failures > len(places) // 20  # flips in tensor data at least must fail


def compressed(path: Path) -> None:
    """Compress an archive as a zip tool does."""
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in records.items():
            target.writestr(name, content)


def test_damage_in_compressed_archives_is_found(tmp_path: Path) -> None:
    """Check compressed archives: torch reads them, but compares no checksums."""
    path = tmp_path / "packed.pt"
    ioshape.save(SMALL, path)
    compressed(path)
    assert_same(ioshape.load(path), SMALL)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        # Flip bits in the literals of the compressed stream, not in its structure.
        middle = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    places = [(offset, bit) for offset in range(middle, middle + 20) for bit in range(8)]
    assert_no_flip_goes_through(path, places)


def test_no_record_of_a_compressed_archive_is_a_folder(tmp_path: Path) -> None:
    """Check a record that looks like a folder: torch returns uninitialised memory for it."""
    path = tmp_path / "packed.pt"
    ioshape.save(torch.ones(1 << 20), path)
    compressed(path)
    content = path.read_bytes()
    entry = content.index(b"archive/data/0", content.index(b"PK\1\2")) - 46
    flip(path, entry + 38, bit=4)
    assert load_or_fail(path) in (None, describe(torch.ones(1 << 20)))


@pytest.mark.parametrize("write", [torch.save, ioshape.save])
def test_no_file_that_is_cut_short_is_loaded(write: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    write(SMALL, path)
    content = path.read_bytes()
    lengths = {*range(0, len(content), 61), *range(len(content) - 60, len(content))}
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        assert load_or_fail(path) is None, f"{length} of {len(content)} bytes"
    path.write_bytes(content + b"more")
    assert load_or_fail(path) in (None, describe(SMALL))


@pytest.mark.parametrize("write", [torch.save, ioshape.save])
def test_damage_at_the_very_beginning(write: Callable[..., Any], tmp_path: Path) -> None:
    """Check the first bytes, from which torch guesses the file's format."""
    path = tmp_path / "model.pt"
    write(SMALL, path)
    for offset in range(4):
        flip(path, offset)
        for read in (ioshape.load, ioshape.verify):
            with pytest.raises(ioshape.DamagedError):
                read(path)
        flip(path, offset)
    ioshape.verify(path)


def test_zeros_in_the_place_of_data_are_found(tmp_path: Path) -> None:
    """Check zeros, which some filesystems leave after a power failure."""
    path = tmp_path / "model.pt"
    ioshape.save(LARGE, path)
    content = bytearray(path.read_bytes())
    content[8192:16384] = bytes(8192)
    path.write_bytes(content)
    with pytest.raises(ioshape.DamagedError, match=r"'model\.first'"):
        ioshape.load(path)


@pytest.mark.parametrize("look", [ioshape.inspect, ioshape.verify])
def test_what_is_no_torch_zip_is_a_format_error(
    look: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no archive at all\n" * 100)
    with pytest.raises(ioshape.errors.FormatError) as caught:
        look(path)
    assert caught.value.filename == str(path)
