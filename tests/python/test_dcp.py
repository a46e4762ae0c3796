# SPDX-License-Identifier: Apache-2.0
"""ioshape.dcp: checkpoints of torch.distributed.checkpoint through this library."""

import fcntl
import io
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import IO, Any, cast

import dcp_kills
import dcp_ranks
import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from command import call, succeed
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # of DCP's own threads
)

RANKS = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


def state(factor: float = 1.0) -> dict[str, Any]:
    base = torch.arange(60.0).reshape(10, 6) * factor
    return {
        "model": {"weight": base, "bias": torch.ones(7, dtype=torch.bfloat16) * factor},
        "view": base[2:5],
        "columns": base[:, 2:4],
        "turned": base.t(),
        "scalar": torch.tensor(2.5 * factor),
        "empty": torch.empty(0, 3),
        "complex": torch.ones(3, dtype=torch.complex64) * factor,
        "flags": torch.tensor([True, False]),
        "large": torch.full((3 << 18,), int(factor)),
        "lists": [1, {"deep": torch.ones(2) * factor}],
        "step": factor * 100,
    }


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    return [blank(one) for one in value] if isinstance(value, list) else 0


def assert_same(value: Any, other: Any) -> None:
    """Equal to the bit, whatever lies in the same storage."""
    assert type(value) is type(other)
    if isinstance(value, torch.Tensor):
        assert value.dtype == other.dtype
        assert torch.equal(value, other)
    elif isinstance(value, dict):
        assert value.keys() == other.keys()
        for key in value:
            assert_same(value[key], other[key])
    elif isinstance(value, (list, tuple)):
        for one, same in zip(value, other, strict=True):
            assert_same(one, same)
    else:
        assert value == other


def save(path: Path, value: Any, **how: Any) -> ioshape.dcp.Writer:
    writer = ioshape.dcp.Writer(path, **how)
    dcp.save(value, storage_writer=writer, no_dist=True)
    return writer


def by_stock(path: Path, like: Any) -> Any:
    loaded = blank(like)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return loaded


def by_us(path: Path, like: Any) -> Any:
    loaded = blank(like)
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(path), no_dist=True)
    return loaded


def entries(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


class _Stopped(dcp.DefaultSavePlanner):
    """Fails at one tensor, after a look around."""

    def __init__(self, folder: Path, name: str = "large") -> None:
        super().__init__()
        self.folder, self.name = folder, name
        self.seen: list[str] = []

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == self.name:
            self.seen = [one for one in entries(self.folder) if not one.startswith(".")]
            raise OSError("no such luck")
        return super().resolve_data(write_item)


# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_stock_dcp_reads_what_we_write(tmp_path: Path, how: dict[str, Any]) -> None:
    writer = save(tmp_path / "a", state(), **how)
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock", **how), no_dist=True)
    assert_same(by_stock(tmp_path / "a", state()), state())
    assert entries(tmp_path / "a") == entries(tmp_path / "stock")
    assert entries(tmp_path) == ["a", "stock"]
    assert {Path(report.path) for report in writer.reports} == set(
        (tmp_path / "a").glob("*.distcp")
    )
    meta = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    assert meta.storage_meta.checkpoint_id == tmp_path / "a"


@pytest.mark.parametrize("how", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_we_read_what_stock_dcp_writes(tmp_path: Path, how: dict[str, Any]) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, **how), no_dist=True)
    assert_same(by_us(tmp_path, state()), state())


def test_format_utils_of_torch_read_ours(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415

    save(tmp_path / "a", {"model": state()["model"]})
    dcp_to_torch_save(tmp_path / "a", tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    assert_same(loaded["model"], state()["model"])


def test_targets_of_another_type_or_form_are_filled(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(10, 6)
    save(tmp_path / "a", {"a": base, "b": base})
    loaded = {"a": torch.zeros(10, 6, dtype=torch.float64), "b": torch.zeros(6, 10).t()}
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(tmp_path / "a"), no_dist=True)
    assert torch.equal(loaded["a"], base.double())
    assert torch.equal(loaded["b"], base)


def test_tensors_are_read_into_those_of_the_state_dict(tmp_path: Path) -> None:
    save(tmp_path / "a", {"large": torch.arange(1 << 20)})
    loaded = {"large": torch.zeros(1 << 20, dtype=torch.int64)}
    before = loaded["large"]
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(tmp_path / "a"), no_dist=True)
    assert torch.equal(before, torch.arange(1 << 20))


class _Turned(StreamTransformExtension):
    """Every byte the other way round."""

    @staticmethod
    def from_descriptor(version: str) -> "_Turned":
        assert version
        return _Turned()

    @staticmethod
    def registry_name() -> str:
        return "test.turned"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Out(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(bytes(255 - byte for byte in bytes(data)))
                return len(data)

        return cast("IO[bytes]", Out())

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch calls it so
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def test_transformed_items_are_written_and_read(tmp_path: Path) -> None:
    value = {"a": torch.arange(100), "step": 3}
    save(tmp_path / "a", value, _extensions=[_Turned()])
    registry = ExtensionRegistry()
    registry.register(_Turned)
    for kind in (dcp.FileSystemReader, ioshape.dcp.Reader):
        loaded = blank(value)
        reader = kind(tmp_path / "a", _extension_registry=registry)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert_same(loaded, value)


# ---- Whole or not at all -------------------------------------------------------------------------


@pytest.mark.parametrize("made_before", [False, True])
def test_a_save_that_fails_leaves_no_trace(tmp_path: Path, made_before: bool) -> None:
    if made_before:
        (tmp_path / "a").mkdir()
    planner = _Stopped(tmp_path)
    writer = ioshape.dcp.Writer(tmp_path / "a")
    with pytest.raises(dcp.CheckpointException):
        dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    assert planner.seen == (["a"] if made_before else [])
    assert entries(tmp_path) == planner.seen
    assert not made_before or entries(tmp_path / "a") == []
    save(tmp_path / "a", state())
    assert_same(by_stock(tmp_path / "a", state()), state())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_checkpoint_is_replaced_or_stays(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "a"
    save(path, state(1), thread_count=threads)
    (path / "config.json").write_text("mine")
    writer = ioshape.dcp.Writer(path, thread_count=threads)
    with pytest.raises(dcp.CheckpointException):  # also where it is another thread that fails
        dcp.save(state(2), storage_writer=writer, planner=_Stopped(path), no_dist=True)
    assert_same(by_stock(path, state()), state(1))
    for factor in (2, 3):
        save(path, state(factor), thread_count=threads)
        assert_same(by_stock(path, state()), state(factor))
    assert (path / "config.json").read_text() == "mine"
    assert len(entries(path)) == threads + 2
    assert entries(tmp_path) == ["a"]


def test_a_larger_checkpoint_of_stock_is_replaced_with_all_of_its_files(tmp_path: Path) -> None:
    dcp.save(
        state(1),
        storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False),
        no_dist=True,
    )
    save(tmp_path, state(2))
    assert len(entries(tmp_path)) == 2
    assert_same(by_stock(tmp_path, state()), state(2))


def test_who_reads_while_it_is_replaced_gets_nothing_of_the_new_one(tmp_path: Path) -> None:
    save(tmp_path / "a", {"w": torch.ones(1000)})

    class Late(ioshape.dcp.Reader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(tmp_path / "a", {"w": torch.ones(1000) * 2})
            return super().read_data(plan, planner)

    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=Late(tmp_path / "a"), no_dist=True)


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    save(tmp_path / "a", state())
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_link_to_a_directory_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "later").symlink_to("new")
    save(tmp_path / "link", state())
    save(tmp_path / "later", state())
    assert (tmp_path / "link").is_symlink()
    assert entries(tmp_path / "real") == entries(tmp_path / "new") == [".metadata", "__0_0.distcp"]


def test_overwrite_can_be_forbidden(tmp_path: Path) -> None:
    save(tmp_path / "a", state(1))
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        save(tmp_path / "a", state(2), overwrite=False)
    assert_same(by_stock(tmp_path / "a", state()), state(1))


def test_ranks_without_collectives_have_files_of_their_own(tmp_path: Path) -> None:
    for factor in (1, 2):
        for rank in (0, 1):
            writer = ioshape.dcp.Writer(tmp_path / "a")
            planner = dcp.DefaultSavePlanner()
            value = state(factor + rank)
            planner.set_up_planner(value, is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
            plans, metadata = planner.create_global_plan([planner.create_local_plan()])
            plan = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])[0]
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
            writer.finish(metadata, [results])
    names = entries(tmp_path / "a")
    assert [name.split("_")[2][:1] for name in names if name.endswith("distcp")] == ["0", "1"]
    assert [name for name in names if not name.endswith("distcp")] == [
        "__0.metadata",
        "__1.metadata",
    ]
    for reader in (dcp.FileSystemReader(tmp_path / "a"), ioshape.dcp.Reader(tmp_path / "a")):
        loaded = reader.read_metadata(rank=1)
        assert set(loaded.state_dict_metadata) >= {"model.weight", "large"}


@pytest.mark.slow
def test_killed_processes_leave_the_last_checkpoint_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, dcp_kills.__file__, tmp_path, "10", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) <= 2  # what earlier ones left was removed


# ---- Damage and hostile files --------------------------------------------------------------------


def _failure(error: BaseException) -> BaseException:
    assert isinstance(error, dcp.CheckpointException)
    return next(iter(error.failures.values()))[0]


def _damage(file: Path) -> None:
    """In the middle of a tensor of ones."""
    data = bytearray(file.read_bytes())
    data[data.index(b"\0\0\x80\x3f" * 1000) + 40_001] ^= 4
    file.write_bytes(data)


def test_damage_is_found_and_its_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"first": torch.zeros(1000), "second": torch.ones(100_000)})
    _damage(tmp_path / "__0_0.distcp")
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
    _damage(tmp_path / "__0_0.distcp")
    if kind == "stock":
        load()  # there is no checksum of a part
        return
    with pytest.raises(dcp.CheckpointException) as caught:
        load()
    assert isinstance(_failure(caught.value), ioshape.DamagedError)
    assert "'large'" in str(_failure(caught.value))


@pytest.mark.parametrize(
    "told", [3, ("a", 1, b""), (1 << 70, 1, b""), (1, 3, b"1234"), (9, 9, b"")], ids=str
)
def test_checksums_that_are_none_are_refused(tmp_path: Path, told: Any) -> None:
    save(tmp_path, {"a": torch.ones(1000, 1000)})
    meta = ioshape.dcp.Reader(tmp_path).read_metadata()
    for info in meta.storage_data.values():
        info.ioshape_checksums = told
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta))
    loaded, planner = {"a": torch.zeros(1000, 1000)}, _Rows()
    reader = ioshape.dcp.Reader(tmp_path)
    with pytest.raises(dcp.CheckpointException):
        dcp.load(loaded, storage_reader=reader, planner=planner, no_dist=True)


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_file_that_was_cut_short_is_no_success(tmp_path: Path, kept: float) -> None:
    save(tmp_path, state())
    file = tmp_path / "__0_0.distcp"
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(dcp.CheckpointException):
        by_us(tmp_path, state())


class _Runs:
    """What a pickle can do to who reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: Metadata({}, planner_data=_Runs(path)),
        lambda path: Metadata({}, storage_data={MetadataIndex("a"): _Runs(path)}),
        _Runs,
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


class Mine:
    """What a planner of the user's own puts into the metadata."""


def test_classes_that_torch_was_told_to_trust_are_read(tmp_path: Path) -> None:
    data = pickle.dumps(Metadata({}, planner_data=[Mine(), PosixPath("a")], storage_data={}))
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ioshape.FormatError):
        ioshape.dcp.Reader(tmp_path).read_metadata()
    with torch.serialization.safe_globals([Mine]):
        loaded = ioshape.dcp.Reader(tmp_path).read_metadata()
    assert isinstance(loaded.planner_data[0], Mine)


# ---- In the background ---------------------------------------------------------------------------


def test_async_save_takes_the_state_as_it_was(tmp_path: Path) -> None:
    value = state(1)
    writer = ioshape.dcp.Writer(tmp_path / "a", cache_staged_state_dict=False)
    future: Any = dcp.async_save(value, storage_writer=writer, no_dist=True)
    value["large"].fill_(9)
    future.result()
    assert_same(by_stock(tmp_path / "a", state()), state(1))


def test_saves_to_one_path_at_the_same_time_leave_one_of_them(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=save, args=(tmp_path / "a", state(factor))) for factor in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = by_stock(tmp_path / "a", state())
    assert_same(loaded, state(loaded["step"] // 100))
    assert len(entries(tmp_path / "a")) == 2


def test_a_save_waits_for_another_that_takes_its_place(tmp_path: Path) -> None:
    save(tmp_path, state(1))
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    thread = threading.Thread(target=save, args=(tmp_path, state(2)))
    thread.start()
    thread.join(1)
    assert thread.is_alive()
    assert_same(by_stock(tmp_path, state()), state(1))
    os.close(fd)
    thread.join()
    assert_same(by_stock(tmp_path, state()), state(2))


_PROCESS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import ioshape.dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    writer = ioshape.dcp.Writer(sys.argv[1] + "/a")
    for factor in (1, 2):
        state = {"w": torch.ones(1000) * factor}
        dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ).result()
"""


@RANKS
@pytest.mark.slow
def test_async_save_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROCESS)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path],
        env={**environment, "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    like = {"w": torch.ones(1000)}
    assert torch.equal(by_stock(tmp_path / "a", like)["w"], like["w"] * 2)


# ---- Ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """By four ranks, by us and by stock."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, dcp_ranks.run("save", folder, 4)


@RANKS
@pytest.mark.slow
def test_each_rank_writes_one_file_and_a_rank_that_fails_changes_nothing(saved: Any) -> None:
    folder, told = saved
    for rank, outcomes in enumerate(told):
        assert outcomes["paths"] == [str(folder / "ours" / f"__{rank}_0.distcp")]
        assert outcomes["failure of replaced"] == outcomes["failure of never"] == [3]
    directories = [path for path in folder.iterdir() if path.is_dir()]
    assert sorted(path.name for path in directories) == ["async", "ours", "replaced", "stock"]
    for path in directories:
        assert len(entries(path)) == 5


@RANKS
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.long)])
def test_another_number_of_ranks_loads_it_by_stock_and_by_us(saved: Any, size: int) -> None:
    folder, told = saved
    for outcomes in dcp_ranks.run("load", folder, size):
        assert len(outcomes) == 5
        for loaded in outcomes.values():
            assert_same(loaded, told[0]["state"])


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
    _damage(ours / "__0_0.distcp")
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
    hostile = Metadata({}, planner_data=_Runs(tmp_path / "ran"), storage_data={})
    for value in (hostile, _Runs(tmp_path / "ran"), 17):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
        assert call(command, tmp_path).returncode == int(value is not hostile)
    assert entries(tmp_path) == [".metadata"]


# ---- patch() -------------------------------------------------------------------------------------


def _own_subclass() -> Any:
    """As code that is imported under patch() has it."""

    class Special(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            return super().write_data(plan, planner)

    return Special


def test_patch_puts_ours_into_code_that_gives_a_path(tmp_path: Path) -> None:
    stock = dcp.FileSystemWriter
    with ioshape.patched(dcp=True):
        assert isinstance(dcp.FileSystemWriter(tmp_path / "x"), ioshape.dcp.Writer)
        assert isinstance(ioshape.dcp.Writer(tmp_path / "x"), dcp.FileSystemWriter)
        assert issubclass(ioshape.dcp.Writer, dcp.FileSystemWriter)
        assert dcp.FileSystemWriter.validate_checkpoint_id(tmp_path / "x")
        assert isinstance(stock(tmp_path / "x"), dcp.FileSystemWriter)
        special = _own_subclass()(tmp_path / "x")
        assert isinstance(special, stock)
        assert not isinstance(special, ioshape.dcp.Writer)
        dcp.save(state(2), storage_writer=special, no_dist=True)
        planner = _Stopped(tmp_path)
        with pytest.raises(dcp.CheckpointException):
            dcp.save(state(), checkpoint_id=tmp_path / "a", planner=planner, no_dist=True)
        assert planner.seen == ["x"]
        dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
        loaded = blank(state())
        dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
        assert_same(loaded, state())
        (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
        with pytest.raises(dcp.CheckpointException):
            dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert dcp.FileSystemWriter is stock
    assert type(dcp.FileSystemWriter(tmp_path / "x")) is stock
    assert not (tmp_path / "ran").exists()


def test_the_trace_has_the_files_of_a_checkpoint_and_not_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "trace"))
    with ioshape.patched(dcp=True):
        dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    lines = [
        json.loads(line)
        for file in (tmp_path / "trace").iterdir()
        for line in file.read_text().splitlines()
    ]
    names = [str(tmp_path / "a" / name) for name in ("__0_0.distcp", ".metadata")]
    # What is no tensor is pickled by DCP's planner first, into memory.
    assert [line["path"] for line in lines if line["path"]] == names


def test_a_writer_of_a_patched_program_can_be_pickled(tmp_path: Path) -> None:
    with ioshape.patched(dcp=True):
        made = dcp.FileSystemWriter(tmp_path / "a")
        made.prepare_global_plan([])  # it has begun
        writer = pickle.loads(pickle.dumps(made))
    made.reset()
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert_same(by_stock(tmp_path / "a", state()), state())


_SCRIPT = """
{imports}
import torch
import torch.distributed.checkpoint as dcp

state = {{"w": torch.ones(1000)}}
dcp.save(state, checkpoint_id="a", no_dist=True)
dcp.load(state, checkpoint_id="a", no_dist=True)
print(type(dcp.FileSystemWriter("b")).__name__, type(dcp.FileSystemReader("b")).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "options", "kinds"),
    [
        ("", [], "Writer Reader"),
        ("import ioshape.dcp", [], "Writer Reader"),
        ("", ["--no-load"], "Writer FileSystemReader"),
    ],
)
def test_a_script_under_ioshape_run_saves_through_us(
    tmp_path: Path, imports: str, options: list[str], kinds: str
) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT.format(imports=imports))
    done = call("run", *options, "script.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ioshape:" not in done.stderr
    assert done.stdout.split() == kinds.split()
    assert entries(tmp_path / "a") == [".metadata", "__0_0.distcp"]
