# SPDX-License-Identifier: Apache-2.0
"""Test ioshape.safetensors.save_sharded(): one set of files by all ranks."""

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import ioshape
import ioshape.safetensors
import pytest
import ranks
import safetensors_ranks
import torch
import torch.distributed as dist
from checkpoints import left_clean
from ioshape._formats.dtypes import DTYPES
from ioshape._integrations.safetensors import sharded
from ioshape._integrations.safetensors.sharded import _Box, _boxes
from ioshape.safetensors import save_sharded
from mounts import small_disk
from processes import run_interpreter

RANKS = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)

SUMS = ".ioshape-sums"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- One rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("most_bytes", [10, 1000, 1920, 5000, 1 << 30])
def test_alone_it_is_the_set_that_huggingface_hub_makes(tmp_path: Path, most_bytes: int) -> None:
    tensors = {str(n): torch.full((n % 5 + 1, 40), n) for n in range(30)}
    (tmp_path / "theirs").mkdir()
    huggingface_hub.save_torch_state_dict(tensors, tmp_path / "theirs", max_shard_size=most_bytes)
    with left_clean():
        reports = save_sharded(tensors, tmp_path / "ours", max_shard_bytes=most_bytes)
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")
    assert {report.path for report in reports} == set(map(str, (tmp_path / "ours").iterdir()))


def test_every_dtype_lies_where_the_original_has_it(tmp_path: Path) -> None:
    tensors = {}
    for name, (dtype, _bits) in DTYPES.items():
        if hasattr(torch, dtype):
            words = torch.arange(48, dtype=torch.uint8) % 2
            tensors[name] = words.view(getattr(torch, dtype)).reshape(2, -1)
    tensors["no dimension"] = torch.tensor(3.0)
    tensors["conjugate"] = torch.view_as_complex(torch.ones(6, 2)).conj()
    save_sharded(tensors, tmp_path / "ours")
    tensors["conjugate"] = tensors["conjugate"].resolve_conj()
    ioshape.safetensors.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (
        tmp_path / "theirs"
    ).read_bytes()


def test_nothing_makes_an_empty_file(tmp_path: Path) -> None:
    save_sharded({}, tmp_path / "ours")
    ioshape.safetensors.save_file({}, tmp_path / "theirs", {"format": "pt"})
    assert files_in(tmp_path / "ours") == {"model.safetensors": (tmp_path / "theirs").read_bytes()}


@pytest.mark.parametrize(
    "wrong", ["text", torch.ones(3).to_sparse(), torch.ones(3, dtype=torch.complex128)]
)
def test_what_no_such_file_can_hold_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="'wrong'"):
        save_sharded({"a": torch.ones(3), "wrong": wrong}, tmp_path / "set")
    assert not list(tmp_path.iterdir())


def test_other_files_stay_and_those_of_the_old_set_go(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(300), "b": torch.ones(300)}
    save_sharded(tensors, tmp_path / "set", max_shard_bytes=1200)
    (tmp_path / "set" / "config.json").write_text("{}")
    save_sharded(tensors, tmp_path / "set")
    assert sorted(files_in(tmp_path / "set")) == ["config.json", "model.safetensors"]


_NO_SPACE = """
    import os
    import ioshape, torch
    from ioshape.safetensors import save_sharded

    ioshape.configure(full="skip")
    small = {"a": torch.ones(300)}
    save_sharded(small, "disk/set")
    try:
        save_sharded({**small, "b": torch.ones(16 << 20)}, "disk/set", max_shard_bytes=1 << 20)
    except ioshape.StorageError as error:
        print(error)
    assert os.listdir("disk") == ["set"]
    assert os.listdir("disk/set") == ["model.safetensors"]
"""


def test_where_a_part_has_no_space_the_old_set_stays(tmp_path: Path) -> None:
    """Save with the setting that skips such saves: an incomplete set must still be an error."""
    said = run_interpreter(tmp_path, _NO_SPACE, prefix=small_disk("tmpfs", tmp_path)).stdout
    assert said.startswith('cannot save "disk/set/model-00001-of-00002.safetensors"'), said


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (4, 1, 3, 2)])
def test_elements_in_a_row_are_boxes_that_are_contiguous(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(max(1, int(torch.Size(shape).numel()))).reshape(shape)
    for begin in range(numbers.numel()):
        for end in range(begin + 1, numbers.numel() + 1):
            boxes = list(_boxes(shape, begin, end))
            found = [box.of(numbers, (0,) * len(shape)) for box in boxes]
            assert all(one.is_contiguous() for one in found)
            assert torch.cat([one.reshape(-1) for one in found]).tolist() == list(range(begin, end))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_each_window_is_written_by_one_that_holds_some_of_it() -> None:
    """Check that few bytes travel and that 64 ranks with rows each write about as much."""
    rows, mib = 64 * 40, 1 << 20
    boxes = {_Box((n * 40, 0), (n * 40 + 40, mib)): [n] for n in range(64)}
    tensors = {"w": sharded._Tensor("uint8", (rows, mib), boxes)}
    windows = sharded._windows(*sharded._files(tensors, 1 << 60)[:1], tensors, 64)
    lengths = [sum(window.end - window.begin for window in of_rank) for of_rank in windows]
    assert sum(lengths) > rows * mib
    assert max(lengths) <= 65 * mib
    for rank, of_rank in enumerate(windows):
        for window in of_rank:
            assert abs(window.begin // mib - rank * 40) < 80


def test_what_all_ranks_hold_each_writes_its_share_of() -> None:
    boxes = {_Box((0,), (256 << 20,)): list(range(8))}
    tensors = {"w": sharded._Tensor("uint8", (256 << 20,), boxes)}
    windows = sharded._windows(*sharded._files(tensors, 1 << 60)[:1], tensors, 8)
    assert sorted(map(len, windows)) == [*[1] * 7, 2]  # the header adds one window


def assert_verified(path: Path) -> None:
    """Check that each MiB of the file has a checksum that is compared."""
    ioshape.verify(path)
    good, status = path.read_bytes(), path.stat()
    for place in range(0, len(good), 1 << 20):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ioshape.DamagedError):
            ioshape.verify(path)
    path.write_bytes(good)


@pytest.mark.parametrize("most_bytes", [3 << 20, 1 << 30])
def test_with_checksums_each_file_has_them_beside_it(tmp_path: Path, most_bytes: int) -> None:
    tensors = {"a": torch.randn(700_001), "b": torch.randn(3, 99_999)}
    for _ in range(2):  # the second save replaces the first
        save_sharded(tensors, tmp_path / "set", max_shard_bytes=most_bytes, checksums=True)
    names = set(files_in(tmp_path / "set"))
    files = {name for name in names if name.endswith(".safetensors")}
    assert names - files - {"model.safetensors.index.json"} == {f"{one}{SUMS}" for one in files}
    for name in files:
        assert_verified(tmp_path / "set" / name)
    save_sharded(tensors, tmp_path / "set", max_shard_bytes=most_bytes)
    assert not list((tmp_path / "set").glob(f"*{SUMS}"))


# ---- Several ranks ------------------------------------------------------------------------------


@RANKS
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_write_what_one_would_write_of_whole_tensors(tmp_path: Path, size: int) -> None:
    paths = ranks.run(safetensors_ranks.__file__, "save", tmp_path, size)
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")
    assert files_in(tmp_path / "one") == files_in(tmp_path / "their one")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    for of_rank in paths:  # all ranks take part
        assert {Path(path).parent for path in of_rank} == {tmp_path / "ours"}
    summed = files_in(tmp_path / "summed")
    beside = [summed.pop(f"{name}{SUMS}") for name in set(index["weight_map"].values())]
    assert all(beside)
    assert summed == files_in(tmp_path / "ours")
    for name in set(index["weight_map"].values()):
        assert_verified(tmp_path / "summed" / name)


@RANKS
@pytest.mark.slow
def test_a_rank_that_fails_or_dies_leaves_the_old_set(tmp_path: Path) -> None:
    told = ranks.run(safetensors_ranks.__file__, "fail", tmp_path, 4, killed=(3,))
    for rank, (text, other, disk) in enumerate(told):
        assert "'text' is not a tensor" in text
        assert "different tensors 'plain'" in other
        assert "no such luck" in disk
        assert disk.startswith("OSError" if rank == 3 else "StorageError")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["there"]
    tensors = ioshape.safetensors.load_file(tmp_path / "there" / "model.safetensors")
    assert tensors["uneven"].tolist() == list(range(7))


@pytest.mark.long
@RANKS
def test_no_rank_has_memory_for_whole_tensors(tmp_path: Path) -> None:
    """Save two tensors of 384 MiB on 4 ranks, one by rows and one by columns."""
    for more_bytes in ranks.run(safetensors_ranks.__file__, "large", tmp_path, 4):
        assert more_bytes < 160 << 20  # three windows of 32 MiB, and the library's buffers
    whole = ioshape.safetensors.safe_open(tmp_path / "large" / "model.safetensors")
    with whole as file:
        assert file.get_slice("rows").get_shape() == [4 << 12, (96 << 20) >> 12]
        parts = [file.get_slice("rows")[n << 12 : (n + 1) << 12] for n in range(4)]
        parts += file.get_slice("columns")[777:778].reshape(4, -1)
    found = [sorted(set(part.reshape(-1).tolist())) for part in parts]
    assert found == [[1], [2], [3], [4]] * 2
