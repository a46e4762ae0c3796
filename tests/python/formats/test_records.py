# SPDX-License-Identifier: Apache-2.0
"""Records that torch has pickled, saved by the library and read back by torch."""

import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from capi import Way, save_records
from tree import program

# Torch uses these records to compute offsets of storages. The result fits torch's own layout only.
LAYOUT = {".format_version", ".storage_alignment"}

Records = list[tuple[str, bytes]]


def model() -> dict[str, Any]:
    """Return shared storages, views, odd layouts, plain Python, and a storage of several MB."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(300, 200)
    large = torch.randn(1500, 1000)
    return {
        "state": layer.state_dict(),
        "large": large,
        "view": large[10:20, ::3],
        "transposed": large.t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "bfloat16": torch.arange(77).to(torch.bfloat16),
        "step": 12,
        "names": ["a", ("b", 1.5), None],
    }


def pickled(value: object) -> Records:
    """Return the records that torch.save makes of a value, in their order."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        records = [(name.split("/", 1)[1], archive.read(name)) for name in archive.namelist()]
    return [(name, data) for name, data in records if name not in LAYOUT]


def assert_same(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    assert list(loaded) == list(saved)
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[name], value), name
            assert loaded[name].stride() == value.stride(), name
    for name, value in saved["state"].items():
        assert torch.equal(loaded["state"][name], value), name
    assert loaded["step"] == saved["step"]
    assert loaded["names"] == saved["names"]


@pytest.mark.parametrize("fetched", [False, True], ids=["memory", "function"])
@pytest.mark.parametrize("way", Way)
def test_torch_reads_its_own_records(tmp_path: Path, way: Way, fetched: bool) -> None:
    path = tmp_path / "model.pt"
    value = model()
    save_records(path, pickled(value), way, fetched)
    assert_same(torch.load(path, weights_only=True), value)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert_same(loaded, value)
    assert loaded["view"].untyped_storage().data_ptr() == loaded["large"].data_ptr()
    subprocess.run([program("unzip"), "-tqq", path], check=True)
