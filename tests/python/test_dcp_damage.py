# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DCP that are damaged or hostile: loaded, and seen by the command."""

import io
import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import call, succeed
from dcp_states import (
    Mine,
    Runs,
    blank,
    by_us,
    damage,
    entries,
    save,
    state,
)
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # of DCP's own threads
)

# ---- Damage and hostile files --------------------------------------------------------------------


def _failure(error: BaseException) -> BaseException:
    assert isinstance(error, dcp.CheckpointException)
    return next(iter(error.failures.values()))[0]


def test_damage_is_found_and_its_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"first": torch.zeros(1000), "second": torch.ones(100_000)})
    damage(tmp_path / "__0_0.distcp")
    loaded = {"first": torch.zeros(1000), "second": torch.zeros(100_000)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(loaded, storage_reader=ioshape.dcp.Reader(tmp_path), no_dist=True)
    failure = _failure(caught.value)
    assert isinstance(failure, ioshape.DamagedError)
    assert "'second'" in str(failure)


class _Rows(dcp.DefaultLoadPlanner):
    """Of a rank that has a part of each tensor: some rows."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return LoadPlan(
            [
                replace(
                    item,
                    storage_offsets=torch.Size([self.first, *item.storage_offsets[1:]]),
                    lengths=torch.Size([10, *item.lengths[1:]]),
                )
                for item in plan.items
            ]
        )

    first = 0


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_parts_of_tensors_are_read_and_those_of_our_files_verified(
    tmp_path: Path, kind: str
) -> None:
    value = {"large": torch.ones(1000, 1000), "small": torch.arange(200.0).reshape(20, 10)}
    writer = (ioshape.dcp.Writer if kind == "ours" else dcp.FileSystemWriter)(tmp_path)
    dcp.save(value, storage_writer=writer, no_dist=True)
    planner = _Rows()
    planner.first = 7
    loaded = blank(value)

    def load() -> None:
        reader = ioshape.dcp.Reader(tmp_path)
        dcp.load(loaded, storage_reader=reader, planner=planner, no_dist=True)

    load()
    for name, whole in value.items():
        assert torch.equal(loaded[name][:10], whole[7:17])
        assert not loaded[name][10:].any()
    damage(tmp_path / "__0_0.distcp")
    if kind == "stock":
        load()  # there is no checksum of a part
        return
    with pytest.raises(dcp.CheckpointException) as caught:
        load()
    assert isinstance(_failure(caught.value), ioshape.DamagedError)
    assert "'large'" in str(_failure(caught.value))


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_file_that_was_cut_short_is_no_success(tmp_path: Path, kept: float) -> None:
    save(tmp_path, state())
    file = tmp_path / "__0_0.distcp"
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(dcp.CheckpointException):
        by_us(tmp_path, state())


@pytest.mark.parametrize(
    "make",
    [
        lambda path: Metadata({}, planner_data=Runs(path)),
        lambda path: Metadata({}, storage_data={MetadataIndex("a"): Runs(path)}),
        Runs,
        lambda _path: 17,
        lambda _path: OrderedDict(a=1),
        lambda _path: Metadata({}, planner_data=io.BytesIO()),
        lambda _path: Metadata(
            {},
            storage_data={
                MetadataIndex("a"): dcp.filesystem._StorageInfo("../../etc/passwd", 0, 1)
            },
        ),
        lambda _path: Metadata(
            {}, storage_data={MetadataIndex("a"): dcp.filesystem._StorageInfo("/etc/passwd", 0, 1)}
        ),
    ],
    ids=["planner", "storage", "alone", "number", "dict", "file", "above", "absolute"],
)
def test_metadata_can_name_nothing_but_a_checkpoint(tmp_path: Path, make: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(make(tmp_path / "ran")))
    with pytest.raises(ioshape.FormatError):
        ioshape.dcp.Reader(tmp_path).read_metadata()
    assert entries(tmp_path) == [".metadata"]


class _ByGetattr:
    """Is pickled as some versions of Python pickle a member of an enumeration."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind = kind
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


def test_members_of_enumerations_and_nothing_else_can_be_named_by_getattr(tmp_path: Path) -> None:
    kind: Any = MEM_FORMAT_ENCODING
    for named in (_ByGetattr(kind, "TORCH_CONTIGUOUS_FORMAT"), kind.TORCH_CONTIGUOUS_FORMAT):
        data = pickle.dumps(Metadata({}, planner_data=named, storage_data={}))
        (tmp_path / ".metadata").write_bytes(data)
        found = ioshape.dcp.Reader(tmp_path).read_metadata().planner_data
        assert found is kind.TORCH_CONTIGUOUS_FORMAT
    for refused in (_ByGetattr(kind, "mro"), _ByGetattr(Metadata, "__init__")):
        data = pickle.dumps(Metadata({}, planner_data=refused, storage_data={}))
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(ioshape.FormatError):
            ioshape.dcp.Reader(tmp_path).read_metadata()


def test_metadata_that_is_no_pickle_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\x80\x04", b"garbage" * 100, pickle.dumps(Metadata({}))[:-5]):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(ioshape.FormatError):
            ioshape.dcp.Reader(tmp_path).read_metadata()


def test_classes_that_torch_was_told_to_trust_are_read(tmp_path: Path) -> None:
    data = pickle.dumps(Metadata({}, planner_data=[Mine(), PosixPath("a")], storage_data={}))
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ioshape.FormatError):
        ioshape.dcp.Reader(tmp_path).read_metadata()
    with torch.serialization.safe_globals([Mine]):
        loaded = ioshape.dcp.Reader(tmp_path).read_metadata()
    assert isinstance(loaded.planner_data[0], Mine)


# ---- The command ---------------------------------------------------------------------------------


def _verified(*arguments: str | Path, code: int = 0) -> list[Any]:
    done = call("verify", "--json", *arguments)
    assert done.returncode == code, done.stderr
    return list(json.loads(done.stdout))


def test_the_command_verifies_a_checkpoint_of_anybody(tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    save(ours, {"first": torch.zeros(1000), "second": torch.ones(100_000)})
    writer = dcp.FileSystemWriter(stock, single_file_per_rank=False)
    dcp.save({**state(), "mine": Mine()}, storage_writer=writer, no_dist=True)
    assert [one["state"] for one in _verified(ours, stock)] == ["ok", "ok"]
    assert [one["state"] for one in _verified("--quick", ours)] == ["ok"]
    damage(ours / "__0_0.distcp")
    told = _verified(ours, code=1)[0]
    assert told["state"] == "damaged"
    assert "'second'" in told["error"]
    (stock / "__0_1.distcp").unlink()
    assert _verified(stock, code=1)[0]["state"] == "unreadable"


def test_the_command_lists_what_is_in_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, {**state(), "mine": Mine()})
    found = json.loads(succeed(call("inspect", "--json", path)))[0]
    assert found["files"] == ["__0_0.distcp"]
    items = {item["name"]: item for item in found["items"]}
    assert items["model.bias"]["dtype"] == "bfloat16"
    assert items["model.weight"]["shape"] == [10, 6]
    assert items["model.weight"]["bytes"] == 240
    assert items["step"]["dtype"] is None
    assert "model.weight" in succeed(call("inspect", path))


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_command_runs_nothing_of_a_description(tmp_path: Path, command: str) -> None:
    hostile = Metadata({}, planner_data=Runs(tmp_path / "ran"), storage_data={})
    for value in (hostile, Runs(tmp_path / "ran"), 17):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
        assert call(command, tmp_path).returncode == int(value is not hostile)
    assert entries(tmp_path) == [".metadata"]
