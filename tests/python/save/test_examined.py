# SPDX-License-Identifier: Apache-2.0
"""Examined saves: names of tensors in alarms, statistics in files, and loads of healthy files."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import left_clean
from command import call, succeed
from ioshape import safetensors
from ioshape._load.reader import Reader, Statistics
from nodes import run_ranks

DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "int8",
    "int64",
    "uint16",
    "bool",
]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with left_clean():
        yield


def state(**values: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    return {"model": {"layer.weight": torch.randn(100, 100), "bias": torch.randn(100)}, **values}


def sick() -> dict[str, Any]:
    wrong = state()
    wrong["model"]["layer.weight"][4, 5] = float("nan")
    return wrong


def test_report_and_log_name_the_tensor_and_its_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert ioshape.save(state(), tmp_path / "m-1.pt").alarm == ""
    report = ioshape.save(sick(), tmp_path / "m-2.pt")
    assert report.alarms == ("nonfinite",)
    assert 'tensor "model.layer.weight" has 1 NaN' in report.alarm
    assert "model.layer.weight" in str(report)
    assert report.alarm in caplog.text
    handle = ioshape.save_async({**sick(), "step": 2}, tmp_path / "m-3.pt")
    assert 'tensor "model.layer.weight" has 1 NaN' in handle.result().alarm
    ioshape.save_group(state(), tmp_path / "run", step=1)
    group = ioshape.save_group(sick(), tmp_path / "run", step=2)
    assert 'tensor "model.layer.weight" has 1 NaN' in group.alarm
    assert "data/" not in caplog.text


def test_a_save_that_fails_names_the_tensor_and_leaves_the_old_file(tmp_path: Path) -> None:
    ioshape.configure(examine={"nonfinite": "fail"})
    path = tmp_path / "model.pt"
    ioshape.save(state(), path)
    before = path.read_bytes()
    handle = ioshape.save_async(sick(), path)
    with pytest.raises(ioshape.StorageError, match=r'"model\.layer\.weight" has 1 NaN'):
        handle.result()
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", DTYPES)
def test_statistics_of_each_dtype_are_in_the_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    dtype = getattr(torch, name)
    tensor = (torch.randn(5000) * 20).to(torch.int8 if name == "uint16" else dtype).to(dtype)
    tensor[:7] = 0
    ioshape.save(tensor, tmp_path / "t.pt")
    with Reader(str(tmp_path / "t.pt")) as reader:
        index = [record.name for record in reader.records()].index("data/0")
        found = reader.statistics(index)
    numbers = (torch.view_as_real(tensor) if dtype.is_complex else tensor).double().flatten()
    assert isinstance(found, Statistics)
    assert found.numbers == numbers.numel()
    assert (found.nans, found.infinities) == (0, 0)
    assert found.zeros == int((numbers == 0).sum())
    assert (found.minimum, found.maximum) == (float(numbers.min()), float(numbers.max()))
    assert found.sum_squares == pytest.approx(float(numbers.square().sum()), rel=1e-4)


def test_inspect_shows_statistics_and_alarms(tmp_path: Path) -> None:
    ioshape.save(state(), tmp_path / "m-1.pt")
    ioshape.save(sick(), tmp_path / "m-2.pt")
    torch.save(state(), tmp_path / "theirs.pt")
    out = succeed(call("inspect", "--stats", tmp_path / "m-2.pt"))
    row = next(line.split() for line in out.splitlines() if "layer.weight" in line)
    assert row[:4] == ["model.layer.weight", "float32", "1", "0"]
    assert row[-1] == "nonfinite"
    ours, theirs = json.loads(
        succeed(call("inspect", "--stats", "--json", tmp_path / "m-1.pt", tmp_path / "theirs.pt"))
    )
    assert ours["tensors"][1]["statistics"]["numbers"] == 100
    assert theirs["tensors"][1]["statistics"] is None


def test_a_healthy_load_skips_files_with_alarms_and_says_why(tmp_path: Path) -> None:
    ioshape.save(state(), tmp_path / "m-1.pt")
    ioshape.save(sick(), tmp_path / "m-2.pt")
    pattern = str(tmp_path / "m-*.pt")
    assert ioshape.load_latest(pattern)["model"]["layer.weight"].isnan().any()
    with pytest.warns(ioshape.errors.FallbackWarning, match=r"m-2\.pt.*nonfinite"):
        loaded = ioshape.load_latest(pattern, healthy=True)
    assert not loaded["model"]["layer.weight"].isnan().any()
    (tmp_path / "m-1.pt").unlink()
    with pytest.raises(ioshape.errors.NoUsableCheckpointError, match="looked wrong"):
        ioshape.load_latest(pattern, healthy=True)


def test_a_healthy_load_of_a_group_skips_checkpoints_with_alarms(tmp_path: Path) -> None:
    ioshape.save_group(state(), tmp_path, step=1)
    ioshape.save_group(sick(), tmp_path, step=2)
    with pytest.warns(ioshape.errors.FallbackWarning, match="looked wrong"):
        loaded = ioshape.load_group(tmp_path, healthy=True)
    assert not loaded["model"]["layer.weight"].isnan().any()
    with pytest.warns(ioshape.errors.FallbackWarning, match="looked wrong"):
        ioshape.load_latest(tmp_path, healthy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ioshape.load_group(tmp_path)["model"]["layer.weight"].isnan().any()
    with pytest.raises(ValueError, match="leave out step"):
        ioshape.load_group(tmp_path, step=1, healthy=True)


RANKS = """
from group_program import *
import warnings

warnings.simplefilter("ignore")
tensor = torch.full((1000,), float(rank)) + torch.arange(1000)
ioshape.save_group({"w": tensor, "step": 1}, arguments[0], step=1)
tensor = tensor + 1
if rank == 1:
    tensor[3] = float("inf")
ioshape.save_group({"w": tensor, "step": 2}, arguments[0], step=2)
say("loaded", step=ioshape.load_group(arguments[0], healthy=True)["step"])
"""


def test_all_ranks_load_the_same_healthy_checkpoint(tmp_path: Path) -> None:
    """Make only the tensor of rank 1 infinite."""
    for events in run_ranks(tmp_path, RANKS, tmp_path / "run", ranks=3):
        assert [event["step"] for event in events if event["event"] == "loaded"] == [1]


# ---- Safetensors ---------------------------------------------------------------------------------


def test_safetensors_have_statistics_beside_their_checksums(tmp_path: Path) -> None:
    path = tmp_path / "m-1.safetensors"
    tensors = {"w": torch.tensor([3.0, 4.0]), "n": torch.arange(5)}
    safetensors.save_file(tensors, path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]
    safetensors.save_file(tensors, path, checksums=True)
    (found,) = json.loads(succeed(call("inspect", "--stats", "--json", path)))
    by_name = {one["name"]: one["statistics"] for one in found["tensors"]}
    assert (by_name["w"]["sum_squares"], by_name["n"]["maximum"]) == (25, 4)
    tensors["w"][0] = float("nan")
    report = safetensors.save_file(tensors, path, checksums=True)
    assert report.alarms == ("nonfinite",)
    with Reader(str(path), any_format=True) as reader, pytest.raises(ioshape.StorageError):
        reader.check_healthy()
    (found,) = json.loads(succeed(call("inspect", "--stats", "--json", path)))
    assert [one["statistics"]["alarms"] for one in found["tensors"] if one["name"] == "w"] == [
        ["nonfinite"]
    ]


def test_safetensors_are_compared_with_the_file_that_was_loaded(tmp_path: Path) -> None:
    safetensors.save_file({"w": torch.ones(9)}, tmp_path / "m-1.safetensors", checksums=True)
    ioshape.configure(examine="nonfinite=warn")  # a new context remembers no saves
    tensors = safetensors.load_file(tmp_path / "m-1.safetensors")
    tensors["w"][0] = float("inf")
    report = safetensors.save_file(tensors, tmp_path / "m-2.safetensors")
    assert "m-1.safetensors" in report.alarm


def test_diff_bounds_the_change_of_safetensors(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        tensors = {"w": torch.tensor([3.0, 4.0]) * factor, "v": torch.ones(3)}
        safetensors.save_file(tensors, tmp_path / f"{name}.safetensors", checksums=True)
    done = call("diff", "--json", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (row,) = json.loads(done.stdout)["differences"]
    assert row["name"] == "w"
    assert row["relative_at_least"] == pytest.approx(2, rel=1e-5)
