# SPDX-License-Identifier: Apache-2.0
"""Test damaged and hostile checkpoints of DCP: loads of them, and the command."""

import contextlib
import importlib
import io
import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any

import hostile
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
from ioshape._group import dcp_contents as contents
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed.checkpoint import metadata as checkpoint_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # in DCP's threads
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


def test_a_shape_that_the_file_does_not_hold_is_damage(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(10, 30)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["weight"]
    described.size = described.chunks[0].sizes = torch.Size([20, 30])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = {"weight": torch.zeros(20, 30)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(loaded, storage_reader=ioshape.dcp.Reader(tmp_path), no_dist=True)
    failure = _failure(caught.value)
    assert isinstance(failure, ioshape.DamagedError)
    assert "shape" in str(failure)
    assert "'weight'" in str(failure)


class _Rows(dcp.DefaultLoadPlanner):
    """A planner for a rank that loads some rows of each tensor."""

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
        load()  # there is no checksum of a slice
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
    with pytest.raises(ioshape.errors.FormatError):
        ioshape.dcp.Reader(tmp_path).read_metadata()
    assert entries(tmp_path) == [".metadata"]


class _ByGetattr:
    """An object that is pickled as some Python versions pickle a member of an enumeration."""

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
        with pytest.raises(ioshape.errors.FormatError):
            ioshape.dcp.Reader(tmp_path).read_metadata()


def test_metadata_that_is_no_pickle_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\x80\x04", b"garbage" * 100, pickle.dumps(Metadata({}))[:-5]):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(ioshape.errors.FormatError):
            ioshape.dcp.Reader(tmp_path).read_metadata()


def test_classes_that_torch_was_told_to_trust_are_read(tmp_path: Path) -> None:
    data = pickle.dumps(Metadata({}, planner_data=[Mine(), PosixPath("a")], storage_data={}))
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ioshape.errors.FormatError):
        ioshape.dcp.Reader(tmp_path).read_metadata()
    with torch.serialization.safe_globals([Mine]):
        loaded = ioshape.dcp.Reader(tmp_path).read_metadata()
    assert isinstance(loaded.planner_data[0], Mine)


_NAMED = {
    "torch.distributed.checkpoint.metadata": (
        *("_MEM_FORMAT_ENCODING", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata"),
        *("MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": (
        *("MEM_FORMAT_ENCODING", "TensorProperties"),
    ),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float32"),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "collections": ("OrderedDict",),
    "builtins": ("frozenset", "set", "getattr"),
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in _NAMED.items() for name in names]
)
def test_no_description_changes_what_it_names(tmp_path: Path, module: str, name: str) -> None:
    named = hostile.named(module, name)
    member = vars(importlib.import_module(module)).get(name)
    before = dict(getattr(member, "__dict__", {}))
    attributes = b"}(\x8c\4_str\x8c\1x\x8c\x0c__defaults__)u"
    for given in (b"N" + attributes + b"\x86", attributes, attributes + b"N\x86"):
        for then in (b".", b"0" + hostile.description(planner=named)[2:]):
            (tmp_path / ".metadata").write_bytes(b"\x80\4" + named + given + b"b" + then)
            with pytest.raises(ioshape.errors.FormatError):
                ioshape.dcp.Reader(tmp_path).read_metadata()
            with contextlib.suppress(ioshape.errors.FormatError):
                contents.contents(str(tmp_path))
    assert dict(getattr(member, "__dict__", {})) == before
    assert str(Path("a")) == "a"


class ByAttribute(pickle.Pickler):
    """A pickler that reduces members of enumerations to getattr(), as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@pytest.mark.parametrize("pickler", [pickle.Pickler, ByAttribute])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("module", [checkpoint_metadata, sharded_metadata])
def test_descriptions_are_read_as_pickle_reads_them(
    tmp_path: Path, module: Any, protocol: int, pickler: type[pickle.Pickler]
) -> None:
    properties = [
        module.TensorProperties(torch.float32, requires_grad=True),
        module.TensorProperties(torch.bfloat16, memory_format=torch.channels_last),
        module.TensorProperties(torch.int8, layout=torch.sparse_coo),
    ]
    size, origin = torch.Size([4, 0, 1 << 40]), torch.Size([0, 0, 0])
    chunk = checkpoint_metadata.ChunkStorageMetadata(origin, size)
    items: dict[str, Any] = {
        f"tensor.{i}": checkpoint_metadata.TensorStorageMetadata(one, size, [chunk, chunk])
        for i, one in enumerate(properties)
    }
    items["rest"] = checkpoint_metadata.BytesStorageMetadata()
    infos = {
        MetadataIndex("tensor.0", origin, 0): dcp.filesystem._StorageInfo("__0_0.distcp", 0, 9),
        MetadataIndex("tensor.0", size): dcp.filesystem._StorageInfo("a/b", 9, 1 << 40, ["zstd"]),
        MetadataIndex("rest"): dcp.filesystem._StorageInfo("__0_1.distcp", 5, 0),
    }
    planned = {
        "tensor.0": ("model", 7, "a"),
        ("a", 1): [1.5, -3, 1 << 70, None, True, b"b", {"c", 1}, frozenset({"d"})],
        "path": PosixPath("/a/b"),
        "ordered": OrderedDict([("b", 1), ("a", torch.float16)]),
    }
    meta = checkpoint_metadata.StorageMeta(PosixPath("/a"), "save", modules=["m"])
    whole = Metadata(items, planned, infos, meta)
    if protocol == 2:
        # this protocol stores bytes and sets as calls
        planned["ordered"] = planned[("a", 1)] = None
    file = io.BytesIO()
    pickler(file, protocol).dump(whole)
    (tmp_path / ".metadata").write_bytes(file.getvalue())
    found = ioshape.dcp.Reader(tmp_path).read_metadata()
    assert found.storage_meta is not None
    found.storage_meta.load_id = None
    assert found == pickle.loads(file.getvalue())
    first = list(found.state_dict_metadata.values())[:3]
    assert {type(getattr(one, "properties", None)) for one in first} == {module.TensorProperties}
    listed = {item.name: item for item in contents.contents(str(tmp_path)).items}
    assert listed["tensor.1"].dtype == "bfloat16"
    assert listed["tensor.1"].shape == tuple(size)
    assert [part.n_bytes for part in listed["tensor.0"].chunks] == [9, 1 << 40]
    assert listed["tensor.0"].chunks[1].is_transformed


@pytest.mark.parametrize("lengths", [[-1], [1 << 62, 4], [1] * 65])
def test_a_shape_that_no_tensor_can_have_is_refused(tmp_path: Path, lengths: list[int]) -> None:
    chunk = hostile.named("torch", "Size") + pickle.dumps((tuple(lengths),), 2)[2:-1] + b"R"
    item = hostile.described("TensorStorageMetadata", b"\x8c\4size", chunk)
    (tmp_path / ".metadata").write_bytes(hostile.description(b"}\x8c\1a" + item + b"s"))
    for read in (
        ioshape.dcp.Reader(tmp_path).read_metadata,
        lambda: contents.contents(str(tmp_path)),
    ):
        with pytest.raises(ioshape.errors.FormatError, match="it has a shape that is not valid"):
            read()


def test_what_is_named_metadata_and_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(ioshape.errors.FormatError):
        ioshape.dcp.Reader(tmp_path).read_metadata()


def test_items_that_overlap_are_refused_by_verify(tmp_path: Path) -> None:
    save(tmp_path, {"first": torch.zeros(1000)})
    description = pickle.loads((tmp_path / ".metadata").read_bytes())
    (info,) = description.storage_data.values()
    for number in range(3):
        description.storage_data[MetadataIndex(f"first{number}")] = info
        description.state_dict_metadata[f"first{number}"] = (
            checkpoint_metadata.BytesStorageMetadata()
        )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(description))
    assert _verified(tmp_path, code=1)[0]["state"] == "damaged"


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


# ---- Items that torch unpickles -----------------------------------------------------------------


class TensorsAlone(dcp.DefaultLoadPlanner):
    """The planner from docs/security.md."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        del value
        raise ValueError(f"{read_item.dest_index.fqn} is pickled")


def test_a_planner_that_takes_no_bytes_executes_nothing_of_an_item(tmp_path: Path) -> None:
    made, checkpoint = tmp_path / "made", tmp_path / "checkpoint"
    writer = ioshape.dcp.Writer(checkpoint)
    dcp.save({"weight": Runs(made)}, storage_writer=writer, no_dist=True)
    reader = ioshape.dcp.Reader(checkpoint)
    state = {"weight": torch.zeros(3)}
    with pytest.raises(dcp.CheckpointException, match="weight is pickled"):
        dcp.load(state, storage_reader=reader, planner=TensorsAlone(), no_dist=True)
    assert not made.exists()
    dcp.load(state, storage_reader=reader, no_dist=True)  # with torch's planner
    assert made.exists()
