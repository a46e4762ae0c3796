# SPDX-License-Identifier: Apache-2.0
"""Test ioshape.torch_checkpointing, a storage for the package torch_checkpointing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

package = pytest.importorskip("torch_checkpointing")
ours = pytest.importorskip("ioshape.torch_checkpointing")


def test_a_manager_saves_and_loads_through_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "trace"))
    config = package.CheckpointManager.Config(
        storage_config=ours.StorageConfig(), save=package.SyncCheckpointSaverConfig()
    )
    manager = package.CheckpointManager(config)
    state: dict[str, Any] = {"model": {"weight": torch.arange(100_000.0)}, "step": 7}
    manager.save(str(tmp_path / "checkpoint"), state)
    loaded = manager.load(
        tmp_path / "checkpoint", into={"model": {"weight": torch.zeros(100_000)}, "step": 0}
    )
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["step"] == 7
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    lines = [
        json.loads(line)
        for file in (tmp_path / "trace").iterdir()
        for line in file.read_text().splitlines()
    ]
    assert {path.name for path in files} == {Path(line["path"]).name for line in lines}


def test_a_file_appears_when_it_is_closed_and_a_rename_takes_nothing(tmp_path: Path) -> None:
    storage = ours.StorageConfig().create_storage()
    with storage.stream_write(tmp_path / "a") as file:
        torch.save(torch.ones(3), file)
        assert not (tmp_path / "a").exists()
    assert torch.equal(torch.load(tmp_path / "a"), torch.ones(3))
    storage.stream_write(tmp_path / "a").discard()
    assert torch.equal(torch.load(tmp_path / "a"), torch.ones(3))
    storage.mkdir(tmp_path / "new")
    storage.write(tmp_path / "new" / "b", b"bytes")
    storage.mkdir(tmp_path / "full")
    storage.write(tmp_path / "full" / "c", b"kept")
    with pytest.raises(OSError, match="occupied"):
        storage.rename(tmp_path / "new", tmp_path / "full", is_directory=True)
    storage.rename(tmp_path / "new", tmp_path / "there", is_directory=True)
    assert (tmp_path / "there" / "b").read_bytes() == b"bytes"
    assert (tmp_path / "full" / "c").read_bytes() == b"kept"
