# SPDX-License-Identifier: Apache-2.0
"""Test several DCP checkpoints in one folder: the newest, damaged ones, and retention."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import call, succeed
from dcp_states import assert_same, blank, damage, entries, save, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an")


def small(step: int) -> dict[str, Any]:
    return {"w": torch.ones(100_000), "step": step}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Save checkpoints in this order, and files that are no checkpoints of the family."""
    for step in (2, 10, 3):
        save(tmp_path / f"step-{step}", small(step))
        os.utime(tmp_path / f"step-{step}" / ".metadata", (1e9, 1e9 + len(entries(tmp_path))))
    save(tmp_path / "best", small(99))
    (tmp_path / "step-77").mkdir()
    (tmp_path / "notes-5").write_text("")
    return tmp_path


def listed(folder: Path, code: int = 0) -> Any:
    done = call("ls", "--json", folder)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def cut(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 1000)


def spoil_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"garbage")


def lose_a_file(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def test_the_newest_is_what_was_saved_last(runs: Path) -> None:
    newest = ioshape.latest(runs)
    assert newest is not None
    assert (newest.step, newest.path, newest.mode) == (3, str(runs / "step-3"), "dcp")
    assert (newest.ranks, newest.files) == (1, 1)
    assert newest.n_bytes == (runs / "step-3" / "__0_0.distcp").stat().st_size
    newest.verify()
    assert [one.step for one in ioshape.checkpoints(runs)] == [2, 10, 3]
    assert [one["step"] for one in listed(runs)["checkpoints"]] == [2, 10, 3]
    assert "step-3" not in succeed(call("ls", runs))
    with pytest.raises(ValueError, match=r"ioshape\.dcp"):
        newest.load(0)
    with pytest.raises(ValueError, match="has no shards"):
        newest.shards()
    assert ioshape.latest(runs / "not there") is None


def test_checkpoints_of_groups_and_of_dcp_lie_beside_each_other(runs: Path) -> None:
    ioshape.save_group({"mine": 1}, runs, 5)
    assert [(one.step, one.mode) for one in ioshape.checkpoints(runs)][2:] == [
        (3, "dcp"),
        (5, "each"),
    ]
    newest = ioshape.latest(runs)
    assert newest is not None
    assert newest.load(0) == {"mine": 1}
    assert ioshape.load_latest(runs) == {"mine": 1}
    save(runs / "step-0000000006", small(6))
    newest = ioshape.latest(runs)
    assert newest is not None
    assert newest.step == 6
    assert not listed(runs)["damaged"]


@pytest.mark.parametrize("harm", [cut, spoil_metadata, lose_a_file])
def test_what_is_not_complete_is_passed_over(runs: Path, harm: Any) -> None:
    harm(runs / "step-3")
    newest = ioshape.latest(runs)
    assert newest is not None
    assert newest.step == 10
    told = listed(runs, code=1)
    assert [one["path"] for one in told["damaged"]] == [str(runs / "step-3")]
    with pytest.warns(ioshape.FallbackWarning, match="step-3"):
        assert ioshape.dcp.load_latest(small(0), runs, no_dist=True) == str(runs / "step-10")


def test_one_whose_bytes_are_damaged_is_passed_over_by_a_load(runs: Path) -> None:
    damage(runs / "step-3" / "__0_0.distcp")
    loaded = {"w": torch.zeros(100_000), "step": 0}
    with pytest.warns(ioshape.FallbackWarning) as caught:
        path = ioshape.dcp.load_latest(loaded, runs, no_dist=True)
    assert path == str(runs / "step-10")
    assert_same(loaded, small(10))
    (warning,) = [one.message for one in caught if one.category is ioshape.FallbackWarning]
    assert isinstance(warning, ioshape.FallbackWarning)
    assert [one.path for one in warning.passed_over] == [str(runs / "step-3")]
    assert isinstance(warning.passed_over[0].error, ioshape.DamagedError)


def test_what_is_no_fault_of_the_checkpoint_is_not_hidden_by_an_older_one(runs: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ioshape.FallbackWarning)
        with pytest.raises(dcp.CheckpointException, match="another"):
            ioshape.dcp.load_latest({"another": torch.zeros(1)}, runs, no_dist=True)


def test_without_any_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in it"):
        ioshape.dcp.load_latest(state(), tmp_path, no_dist=True)
    save(tmp_path / "step-1", small(1))
    cut(tmp_path / "step-1")
    with pytest.raises(
        ioshape.errors.NoUsableCheckpointError, match="none of 1 checkpoint can be used"
    ):
        ioshape.dcp.load_latest(small(0), tmp_path, no_dist=True)


def test_prune_removes_the_oldest_with_all_that_is_in_them(runs: Path) -> None:
    (runs / "step-2" / "extra").mkdir()
    (runs / "step-2" / "extra" / "file").write_text("mine")
    assert ioshape.prune(runs, keep_last=1, keep_every=10, dry_run=True) == [2]
    assert "step-2" in entries(runs)
    assert ioshape.prune(runs, keep_last=1, keep_every=10) == [2]
    assert entries(runs) == ["best", "notes-5", "step-10", "step-3", "step-77"]
    told = succeed(call("prune", "--keep-last", "1", "--yes", runs))
    assert "removed step 10" in told
    assert [one.step for one in ioshape.checkpoints(runs)] == [3]
    loaded = small(0)
    ioshape.dcp.load_latest(loaded, runs, no_dist=True)
    assert_same(loaded, small(3))


def test_the_command_verifies_one_or_all_of_a_series(runs: Path) -> None:
    damage(runs / "step-10" / "__0_0.distcp")
    assert "step-3" in succeed(call("verify", runs))
    assert call("verify", "--step", "10", runs).returncode == 1
    done = call("verify", "--all", runs)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 3


def test_the_command_verifies_both_that_have_a_step(runs: Path) -> None:
    ioshape.save_group(small(3), runs, 3)
    group = runs / "step-0000000003"
    assert len(succeed(call("verify", "--step", "3", runs)).splitlines()) == 2
    (data,) = group.glob("*.pt")
    damage(data)
    for arguments in (("--step", "3", runs), ("--all", runs), (group,)):
        done = call("verify", *arguments)
        assert done.returncode == 1
        assert f'"{data}" is damaged' in done.stdout


def test_a_writer_keeps_the_last_of_its_name(tmp_path: Path) -> None:
    save(tmp_path / "best-0.25", small(9))
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", small(step), keep_last=2)
        save(tmp_path / f"ema-{step}", small(step), keep_last=1)
    save(tmp_path / "best", small(9), keep_last=1)
    assert entries(tmp_path) == ["best", "best-0.25", "ema-3", "step-2", "step-3"]
    with pytest.raises(ValueError, match="keep_last"):
        ioshape.dcp.Writer(tmp_path, keep_last=0)


def test_a_checkpoint_that_cannot_be_removed_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "step-1", small(1))

    def refuse(_path: str) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr("ioshape._group.dcp_contents._remove", refuse)
    save(tmp_path / "step-2", small(2), keep_last=1)
    assert entries(tmp_path) == ["step-1", "step-2"]
    assert "not here" in caplog.text
    loaded = blank(small(0))
    ioshape.dcp.load_latest(loaded, tmp_path, no_dist=True)
    assert loaded["step"] == 2
