# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of tensors on a GPU, which pass through pinned memory.

The device is simulated (simulated_device.py): its memory is the CPU's, and it makes each copy as
late as it may. Only the calls of torch in ioshape/_device/stream.py are replaced; the other code is
that of a real device. Tests marked `gpu` need a real one: tests/run.sh gpu.
"""

import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from ioshape._device import incoming as _incoming
from ioshape._device import outgoing as _outgoing
from ioshape._device import stream as _stream
from ioshape._native import ffi
from ioshape._save import pickling
from ioshape.safetensors import load_file, save_file
from records import flip, names_in, offset_of
from same import assert_same, describe
from simulated_device import SimulatedDevice
from stock import SURROUNDINGS, attempt, stock

MIB = 1 << 20


class _Elsewhere:
    """The simulated torch.device of storages."""

    type = "elsewhere"

    def __str__(self) -> str:
        return "elsewhere:0"


class Remote:
    """A storage of the CPU that claims to be on a device."""

    device = _Elsewhere()

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def nbytes(self) -> int:
        return self.storage.nbytes()

    def data_ptr(self) -> int:
        """Return what identifies the storage, as for memory of a GPU. Nothing may read there."""
        return self.storage.data_ptr()


class Remotes(SimulatedDevice):
    """A simulated device that claims to hold all saved storages."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()  # names of the threads that have fetched

    def asks(self, n_bytes: int) -> None:
        self.threads.add(threading.current_thread().name)
        super().asks(n_bytes)


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Remotes:
    simulated = Remotes()
    collect, bytes_of = pickling.collect, _stream.bytes_of

    def collect_remote(*arguments: Any) -> Any:
        pickled = collect(*arguments)
        if not pickled.has_device_storages and any(one.storage for one in pickled.records):
            raise AssertionError("torch copied the storages itself")
        for record in pickled.records:
            if record.storage is not None:
                record.storage = Remote(record.storage)  # type: ignore[assignment]
        return pickled

    monkeypatch.setattr(pickling, "_on_device", lambda _storage: True)
    monkeypatch.setattr(pickling, "collect", collect_remote)
    monkeypatch.setattr(_outgoing, "bytes_of", lambda remote: bytes_of(remote.storage))
    monkeypatch.setattr(_outgoing, "open_stream", simulated.open)
    return simulated


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Redirect loads to the CPU to a simulated device."""
    simulated = SimulatedDevice()
    monkeypatch.setattr(_incoming, "open_stream", simulated.open)
    return simulated


@pytest.fixture
def little_staging() -> None:
    """Set the least staging memory that is allowed."""
    ioshape.configure(staging_bytes=16 * MIB)


def state() -> Any:
    return {
        "large": zoo.filled(torch.float32, 1100, 1031),
        "view": zoo.filled(torch.int16, 9000)[7:200:3],
        "empty": torch.zeros(0),
        "byte": torch.tensor([5], dtype=torch.uint8),
        "module": torch.nn.Linear(30, 40),
        "text": "x",
    }


def saved(value: Any, path: Path, background: bool) -> ioshape.Report:
    report = ioshape.save_async(value, path).result() if background else ioshape.save(value, path)
    assert report.written_by == "ioshape", report
    return report


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("piece_bytes", [16 * MIB, 4096, 1000, 100_003])
@pytest.mark.slow
def test_what_is_fetched_is_the_same_file(
    piece_bytes: int,
    background: bool,
    remote: Remotes,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(_stream, "PIECE_BYTES", piece_bytes)
    value = state()
    saved(value, tmp_path / "fetched.pt", background)
    records = ioshape.inspect(tmp_path / "fetched.pt").records
    storages = [record.n_bytes for record in records if record.name.startswith("data/")]
    assert sum(remote.copied) == sum(storages) > 4 * MIB
    assert remote.is_idle
    assert remote.most_pinned_bytes <= _stream.BUFFERS * piece_bytes
    monkeypatch.undo()
    saved(value, tmp_path / "read.pt", background)
    assert (tmp_path / "fetched.pt").read_bytes() == (tmp_path / "read.pt").read_bytes()
    assert stock().load(tmp_path / "fetched.pt").description == describe(value)


@pytest.mark.filterwarnings("ignore:backward hook .* will not be serialized")
@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("name", [n for n, case in zoo.CASES.items() if not case.refused])
@pytest.mark.slow
def test_every_kind_of_object_can_be_fetched(name: str, tmp_path: Path) -> None:
    value = zoo.build(name)
    saved(value, tmp_path / "fetched.pt", background=True)
    torch.save(value, tmp_path / "theirs.pt")
    expected = stock().load(tmp_path / "theirs.pt")
    assert stock().load(tmp_path / "fetched.pt") == expected


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("name", [n for n, case in zoo.CASES.items() if case.refused])
def test_what_torch_refuses_is_refused(name: str, tmp_path: Path) -> None:
    value = zoo.build(name)
    expected = attempt(lambda: torch.save(value, tmp_path / "theirs.pt"), tmp_path)
    found = attempt(lambda: saved(value, tmp_path / "ours.pt", background=False), tmp_path)
    assert (found.error or ("",))[0] == (expected.error or ("",))[0]
    assert not (tmp_path / "ours.pt").exists()


@pytest.mark.usefixtures("remote", "little_staging")
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_a_device_may_hold_more_than_the_staging_memory(background: bool, tmp_path: Path) -> None:
    value = [zoo.filled(torch.uint8, 40 * MIB + 13), zoo.filled(torch.int32, 5 * MIB)]
    report = saved(value, tmp_path / "model.pt", background)
    assert report.file_bytes > 60 * MIB
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


@pytest.mark.usefixtures("little_staging")
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_memory_may_hold_more_than_the_staging_memory(background: bool, tmp_path: Path) -> None:
    value = [zoo.filled(torch.uint8, 40 * MIB + 13), zoo.filled(torch.int32, 5 * MIB)]
    saved(value, tmp_path / "model.pt", background)
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


@pytest.mark.usefixtures("little_staging")
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("late", [False, True], ids=["asked", "done"])
@pytest.mark.parametrize("fails_at", [0, 17 * MIB])
def test_a_device_that_fails_fails_the_save(
    fails_at: int, late: bool, background: bool, remote: Remotes, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    remote.fails_at, remote.fails_late = fails_at, late
    with pytest.raises(torch.AcceleratorError, match="the device is gone"):
        saved([zoo.filled(torch.uint8, 40 * MIB)], path, background)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["model.pt"]
    remote.fails_at = None
    saved([torch.arange(5)], path, background)  # the failure has left nothing behind
    assert_same(ioshape.load(path), [torch.arange(5)])


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("surroundings", [name for name in SURROUNDINGS if "fake" not in name])
def test_a_device_is_saved_wherever_the_call_is(
    surroundings: str, background: bool, remote: Remotes, tmp_path: Path
) -> None:
    """Check calls in contexts that change where new tensors are created."""
    value = [zoo.filled(torch.float32, 500_000), torch.arange(3)]
    with SURROUNDINGS[surroundings]():
        saved(value, tmp_path / "model.pt", background)
    assert remote.copied
    assert_same(torch.load(tmp_path / "model.pt"), value)


def test_threads_that_fetch_are_not_kept(remote: Remotes, tmp_path: Path) -> None:
    saved([zoo.filled(torch.uint8, 5 * MIB)], tmp_path / "model.pt", background=False)
    assert any(name.startswith("Dummy") for name in remote.threads)
    assert not [one for one in threading.enumerate() if one.name in remote.threads - {"MainThread"}]


def test_the_device_may_change_once_the_background_has_it(remote: Remotes, tmp_path: Path) -> None:
    """Check that the save includes what the device's stream is still computing when it begins."""
    value = torch.zeros(3_000_000)
    remote.asked.append(lambda: value.copy_(torch.arange(3_000_000)))
    handle = ioshape.save_async(value, tmp_path / "model.pt")
    assert remote.is_idle
    value.zero_()
    handle.wait()
    assert_same(ioshape.load(tmp_path / "model.pt"), torch.arange(3_000_000.0))


def test_small_storages_share_a_piece(remote: Remotes, tmp_path: Path) -> None:
    value = [torch.full((1000,), float(i)) for i in range(300)]
    saved(value, tmp_path / "model.pt", background=False)
    assert remote.most_pinned_bytes == 300 * 4000
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


def test_what_is_copied_later_comes_from_a_device_in_two_rows(
    remote: Remotes, tmp_path: Path
) -> None:
    """Check that small storages are fetched in the call, and large ones before the next step."""
    value = [zoo.filled(torch.float32, 500 * (600 if i % 2 else 1)) for i in range(9)]
    expected = [one.clone() for one in value]
    handle = ioshape.save_async(value, tmp_path / "model.pt", lazy=True)
    for one in value[::2]:
        one.zero_()
    ioshape.before_step()
    assert remote.is_idle
    for one in value:
        one.zero_()
    assert handle.result().written_by == "ioshape"
    assert_same(ioshape.load(tmp_path / "model.pt"), expected)


@pytest.mark.usefixtures("remote")
def test_what_changes_too_early_on_a_device_fails_the_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    value = {"small": torch.ones(3), "a": torch.zeros(1, MIB), "b": torch.zeros(3, MIB)}
    ioshape.save(value, path)
    first = ioshape.load(path)
    send = _outgoing.Outgoing._send

    def late(self: Any) -> None:
        if self._sample is not None:
            value["b"][1].add_(1)
        send(self)

    monkeypatch.setattr(_outgoing.Outgoing, "_send", late)
    handle = ioshape.save_async(value, path, lazy=True)
    with pytest.raises(ioshape.StorageError, match=r"'data/2'.*change it only after") as raised:
        handle.result()
    assert raised.value.record == "data/2"
    assert raised.value.path == str(path)
    assert [one.name for one in tmp_path.iterdir()] == ["model.pt"]
    assert_same(ioshape.load(path), first)


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("works", [0, 1], ids=["at once", "in the end"])
def test_without_memory_for_a_sample_nobody_tells_what_has_changed(
    works: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [torch.cat] * works

    def cat(tensors: Any) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("none left")
        return left.pop()(tensors)

    monkeypatch.setattr(torch, "cat", cat)
    value = {"a": torch.ones(1, MIB)}
    ioshape.save_async(value, tmp_path / "model.pt", lazy=True).wait()
    assert not left
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 0, 1], [3, 0, 2, 1], [1, 3]])
@pytest.mark.parametrize("piece_bytes", [64, 1000, 10_000])
def test_storages_are_fetched_in_whatever_order_they_are_asked_for(
    order: list[int], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stream, "PIECE_BYTES", piece_bytes)
    simulated = SimulatedDevice()
    monkeypatch.setattr(_outgoing, "open_stream", simulated.open)
    values = [zoo.filled(torch.uint8, n_bytes) for n_bytes in (700, 33, 4000, 64)]
    couriers, notes = _outgoing.couriers_for(
        [_outgoing.Fetched("", one.untyped_storage(), False) for one in values]
    )
    assert not notes
    for number in order:
        into = bytearray(values[number].numel())
        half = len(into) // 2
        couriers[number].fetch(0, ffi.from_buffer(memoryview(into)[:half]), half)
        couriers[number].fetch(half, ffi.from_buffer(memoryview(into)[half:]), len(into) - half)
        assert bytes(into) == values[number].numpy().tobytes()
    with pytest.raises(RuntimeError, match="requested twice"):
        couriers[order[0]].fetch(0, ffi.from_buffer(into), 1)


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_without_pinned_memory_a_device_is_saved_and_the_report_says_so(
    background: bool, remote: Remotes, tmp_path: Path
) -> None:
    remote.can_pin = False
    value = state()
    report = saved(value, tmp_path / "model.pt", background)
    (step,) = [one for one in report.downgrades if one.code == "torch"]
    assert "elsewhere:0" in step
    assert "no more memory can be pinned" in step
    assert not remote.copied
    assert_same(ioshape.load(tmp_path / "model.pt", weights_only=False), value)


def test_skipped_data_of_a_device_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pickling, "_on_device", lambda _storage: True)
    with torch.serialization.skip_data():
        report = ioshape.save({"weight": torch.ones(1000)}, tmp_path / "model.pt")
    assert report.written_by == "torch"
    assert not torch.load(tmp_path / "model.pt")["weight"].any()


def test_without_the_byteorder_of_python_a_device_is_saved_as_well(
    remote: Remotes, tmp_path: Path
) -> None:
    value = state()
    report = ioshape.save(value, tmp_path / "model.pt", _disable_byteorder_record=True)
    assert report.written_by == "ioshape"
    assert remote.copied
    assert_same(ioshape.load(tmp_path / "model.pt", weights_only=False), value)


class SavesWhileItIsPickled:
    """An object whose pickling saves another pickle, as in some libraries."""

    def __init__(self, path: Path | None = None) -> None:
        self.tensor = torch.full((5,), 7.0)
        self.path = path

    def __reduce__(self) -> Any:
        buffer = io.BytesIO()
        torch.save(self.tensor, buffer)
        if self.path is not None:
            ioshape.save(self.tensor, self.path)
        return torch.load, (io.BytesIO(buffer.getvalue()),)


@pytest.mark.parametrize("to_a_path", [False, True])
def test_what_is_saved_while_pickling_is_not_mixed_up(
    to_a_path: bool, remote: Remotes, tmp_path: Path
) -> None:
    inner = SavesWhileItIsPickled(tmp_path / "inner.pt" if to_a_path else None)
    value = {"a": torch.zeros(3), "inner": inner, "b": torch.ones(2)}
    ioshape.save(value, tmp_path / "model.pt")
    assert remote.copied
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(loaded, {"a": torch.zeros(3), "inner": inner.tensor, "b": torch.ones(2)})


def test_a_device_storage_is_let_go_when_it_has_been_fetched() -> None:
    simulated = SimulatedDevice()
    storages = [torch.ones(100).untyped_storage(), torch.ones(50).untyped_storage()]
    stream = simulated.open(None)
    outgoing = _outgoing.Outgoing(storages, stream, _stream.buffers_of(stream, 600))
    into = bytearray(400)
    outgoing.fetch(0, 0, ffi.from_buffer(into), 400)
    assert bytes(into) == bytes(storages[0])
    assert outgoing._sources[0] is None
    assert outgoing._sources[1] is not None
    outgoing.fetch(1, 0, ffi.from_buffer(into), 200)
    gone = weakref.ref(outgoing)
    gc.disable()
    try:
        assert not simulated.pinned_bytes
        courier = _outgoing.Courier(outgoing, 0)
        handle = ffi.new_handle(courier)
        del courier, outgoing, handle
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_tensors_of_a_checkpoint_of_dcp_are_fetched(remote: Remotes, tmp_path: Path) -> None:
    value = {"large": torch.arange(5 * MIB), "small": torch.ones(3), "step": 7}
    writer = ioshape.dcp.Writer(tmp_path / "a")
    dcp.save(value, storage_writer=writer, no_dist=True)
    assert sum(remote.copied) == 40 * MIB + 12
    loaded = {"large": torch.zeros(5 * MIB, dtype=torch.int64), "small": torch.zeros(3), "step": 0}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "a"), no_dist=True)
    assert_same(loaded, value)
    remote.copied.clear()
    remote.fails_at = MIB
    with pytest.raises(dcp.CheckpointException, match="the device is gone"):
        dcp.save(value, storage_writer=ioshape.dcp.Writer(tmp_path / "b"), no_dist=True)
    assert names_in(tmp_path) == ["a"]


# ---- Loading -------------------------------------------------------------------------------------

WRITERS = pytest.mark.parametrize("write", [torch.save, ioshape.save], ids=["torch", "ours"])


def large() -> dict[str, Any]:
    base = zoo.filled(torch.float32, 1100, 1031)
    return {
        "base": base,
        "view": base[7:900, 3:],
        "last": zoo.filled(torch.int16, 5 * MIB),
        "images": zoo.filled(torch.float32, 4, 8, 90, 90).to(memory_format=torch.channels_last),
        "small": torch.arange(5),
        "step": 7,
    }


def emptied(value: Any) -> Any:
    """Return a copy with zeros, in which tensors that share memory still share it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    empty = torch.load(buffer)
    for one in empty.values():
        if isinstance(one, torch.Tensor):
            one.zero_()
    return empty


def storage_bytes(value: dict[str, Any]) -> int:
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in value.values()
        if isinstance(one, torch.Tensor)
    }
    return sum(storages.values())


@pytest.mark.slow
@WRITERS
@pytest.mark.parametrize("piece_bytes", [16 * MIB, 3 * MIB, 1_000_003])
def test_a_device_gets_what_torch_would_load(
    piece_bytes: int,
    write: Any,
    simulated: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(_stream, "PIECE_BYTES", piece_bytes)
    value = large()
    write(value, tmp_path / "model.pt")
    for where in (None, "cpu", {"cpu": "cpu"}, torch.device("cpu")):
        simulated.copied.clear()
        found = ioshape.load(tmp_path / "model.pt", map_location=where)
        assert_same(found, value)
        assert found["view"].untyped_storage().data_ptr() == found["base"].data_ptr()
        # Each byte is copied once, and none through unpinned memory.
        assert sum(simulated.copied) == storage_bytes(value)
        assert simulated.is_idle
    assert simulated.most_pinned_bytes <= _stream.BUFFERS * piece_bytes


@WRITERS
@pytest.mark.parametrize("piece_bytes", [16 * MIB, 3 * MIB, 1_000_003])
def test_tensors_on_a_device_are_filled(
    piece_bytes: int,
    write: Any,
    simulated: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(_stream, "PIECE_BYTES", piece_bytes)
    value = large()
    del value["view"]
    write(value, tmp_path / "model.pt")
    target = emptied(value)
    versions = {name: one._version for name, one in target.items() if name != "step"}
    # The device's stream still has to zero this tensor. The load must come after that.
    simulated.asked.append(target["base"].data.zero_)
    found = ioshape.load(tmp_path / "model.pt", into=target)
    simulated.run_caller()
    assert_same(found, value)
    assert all(found[name] is target[name] for name in versions)
    assert all(target[name]._version > version for name, version in versions.items())
    assert sum(simulated.copied) == storage_bytes(value)
    assert simulated.is_idle


@WRITERS
def test_a_view_on_a_device_is_filled_by_way_of_the_cpu(
    write: Any, simulated: SimulatedDevice, tmp_path: Path
) -> None:
    value = large()
    write(value, tmp_path / "model.pt")
    assert_same(ioshape.load(tmp_path / "model.pt", into=emptied(value)), value)
    assert simulated.is_idle


@WRITERS
@pytest.mark.parametrize("into", [False, True])
def test_damage_is_found_on_the_way_to_a_device(
    into: bool, write: Any, simulated: SimulatedDevice, tmp_path: Path
) -> None:
    """Check a file of torch.save, too: it has one checksum for a whole storage."""
    value = {"first": zoo.filled(torch.float32, MIB), "second": zoo.filled(torch.uint8, 40 * MIB)}
    path = tmp_path / "model.pt"
    write(value, path)
    flip(path, offset_of(path, "data/1") + 38 * MIB + 5)
    target = {name: torch.zeros_like(one) for name, one in value.items()} if into else None
    with pytest.raises(ioshape.DamagedError, match="'second'") as raised:
        ioshape.load(path, into=target)
    assert raised.value.record == "data/1"
    if into:
        assert raised.value.changed == ("first", "second")
    assert simulated.is_idle  # no copy to the target is left in flight
    assert_same(ioshape.load(path, verify=False)["first"], value["first"])


@pytest.mark.parametrize("late", [False, True], ids=["asked", "done"])
@pytest.mark.parametrize("fails_at", [0, 17 * MIB])
def test_a_device_that_fails_fails_the_load(
    fails_at: int, late: bool, simulated: SimulatedDevice, tmp_path: Path
) -> None:
    value = [zoo.filled(torch.uint8, 40 * MIB)]
    ioshape.save(value, tmp_path / "model.pt")
    simulated.fails_at, simulated.fails_late = fails_at, late
    with pytest.raises(torch.AcceleratorError, match="the device is gone"):
        ioshape.load(tmp_path / "model.pt", into=[torch.zeros_like(value[0])])
    simulated.fails_at = None  # the failure has left nothing behind
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


def test_without_pinned_memory_torch_brings_it_to_the_device(
    simulated: SimulatedDevice, tmp_path: Path
) -> None:
    value = large()
    ioshape.save(value, tmp_path / "model.pt")
    simulated.can_pin = False
    assert_same(ioshape.load(tmp_path / "model.pt"), value)
    assert_same(ioshape.load(tmp_path / "model.pt", into=emptied(value)), value)
    assert not simulated.copied


def test_a_part_of_a_file_goes_to_a_device(simulated: SimulatedDevice, tmp_path: Path) -> None:
    value = large()
    ioshape.save(value, tmp_path / "model.pt")
    found = ioshape.load(tmp_path / "model.pt", only=["last", "step"])
    assert_same(found, {"last": value["last"], "step": 7})
    assert sum(simulated.copied) == value["last"].nbytes


def test_one_tensor_under_two_names_goes_to_a_device(
    simulated: SimulatedDevice, tmp_path: Path
) -> None:
    tensor = zoo.filled(torch.float32, 90_000)
    ioshape.save({"a": tensor, "b": tensor}, tmp_path / "model.pt")
    found = ioshape.load(tmp_path / "model.pt")
    assert found["a"] is found["b"]
    assert torch.equal(found["a"], tensor)
    assert simulated.copied == [tensor.nbytes]


def test_conjugates_stay_what_they_are_on_a_device(
    simulated: SimulatedDevice, tmp_path: Path
) -> None:
    base = torch.view_as_complex(zoo.filled(torch.float32, 90_000, 2))
    value = {
        "conj": base.conj(),
        "neg": torch._neg_view(zoo.filled(torch.float32, 90_000)),
        "weight": torch.nn.Parameter(zoo.filled(torch.float32, 90_000)),
    }
    torch.save(value, tmp_path / "model.pt")
    found = ioshape.load(tmp_path / "model.pt")
    expected = torch.load(tmp_path / "model.pt")
    assert found["conj"].is_conj()
    assert found["neg"].is_neg()
    assert type(found["weight"]) is torch.nn.Parameter
    for name in value:
        assert torch.equal(found[name].resolve_conj(), expected[name].resolve_conj())
    assert simulated.copied


@pytest.mark.parametrize("checksums", [False, True])
def test_a_safetensors_file_goes_to_a_device(
    checksums: bool, simulated: SimulatedDevice, tmp_path: Path
) -> None:
    value = {
        "a": zoo.filled(torch.float32, 300, 1031),
        "b": zoo.filled(torch.bfloat16, 5),
        "c": zoo.filled(torch.uint8, 18 * MIB + 3),
        "d": torch.zeros(0, 4),
    }
    save_file(value, tmp_path / "model.safetensors", checksums=checksums)
    found = load_file(tmp_path / "model.safetensors")  # load_file() returns the order of the file
    assert_same({name: found[name] for name in value}, value)
    assert sum(simulated.copied) == sum(one.nbytes for one in value.values())
    target = torch.zeros_like(value["c"])
    found = load_file(tmp_path / "model.safetensors", into={"c": target})
    assert found["c"] is target
    assert_same({name: found[name] for name in value}, value)
    assert simulated.is_idle


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("ours", [True, False])
def test_a_checkpoint_of_dcp_goes_to_a_device(
    ours: bool, simulated: SimulatedDevice, tmp_path: Path
) -> None:
    value: Any = {"large": zoo.filled(torch.float32, 5, MIB), "small": torch.ones(3), "step": 7}
    folder = tmp_path / "a"
    writer = ioshape.dcp.Writer(folder) if ours else dcp.FileSystemWriter(folder)
    dcp.save(value, storage_writer=writer, no_dist=True)
    loaded: Any = {"large": torch.zeros(5, MIB), "small": torch.zeros(3), "step": 0}
    target = loaded["large"]
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(folder), no_dist=True)
    assert_same(loaded, value)
    assert loaded["large"] is target
    assert sum(simulated.copied) == value["large"].nbytes
    (file,) = folder.glob("*.distcp")
    place = file.read_bytes().find(bytes(value["large"].untyped_storage()[:4096]))
    flip(file, place + 19 * MIB)
    with pytest.raises(dcp.CheckpointException, match="'large'"):
        dcp.load(loaded, storage_reader=ioshape.dcp.Reader(folder), no_dist=True)
    assert simulated.is_idle


# ---- With a real GPU -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_a_gpu_is_saved_as_by_torch(background: bool, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    base = torch.arange(20_000_000, device="cuda")
    value = {
        "base": base,
        "view": base[5:100:3],
        "cpu": torch.arange(5.0),
        "half": torch.ones(3, 4, device="cuda", dtype=torch.bfloat16).t(),
        "module": torch.nn.Linear(30, 40).cuda(),
        "sparse": torch.eye(4, device="cuda").to_sparse(),
        "empty": torch.zeros(0, device="cuda"),
        "generator": torch.Generator("cuda").manual_seed(5).get_state(),
    }
    saved(value, ours, background)
    torch.save(value, theirs)
    for where in (None, "cpu", "cuda:0"):
        assert_same(
            torch.load(ours, weights_only=False, map_location=where),
            torch.load(theirs, weights_only=False, map_location=where),
        )
        assert_same(
            ioshape.load(theirs, weights_only=False, map_location=where),
            torch.load(theirs, weights_only=False, map_location=where),
        )


@pytest.mark.gpu
def test_a_gpu_may_change_once_the_background_has_it(tmp_path: Path) -> None:
    """Check that the save includes what the GPU's stream is still computing when it begins."""
    value = torch.zeros(50_000_000, device="cuda")
    for _ in range(100):
        value += 1
    handle = ioshape.save_async(value, tmp_path / "model.pt")
    value.zero_()
    handle.wait()
    assert bool((ioshape.load(tmp_path / "model.pt", map_location="cpu") == 100).all())


@pytest.mark.gpu
@pytest.mark.usefixtures("little_staging")
def test_a_gpu_may_hold_more_than_the_staging_memory(tmp_path: Path) -> None:
    value = torch.arange(30 * MIB, device="cuda", dtype=torch.int32)
    handle = ioshape.save_async(value, tmp_path / "model.pt")
    value.zero_()
    handle.wait()
    expected = torch.arange(30 * MIB, dtype=torch.int32)
    assert torch.equal(ioshape.load(tmp_path / "model.pt", map_location="cpu"), expected)


@pytest.mark.gpu
@WRITERS
def test_a_gpu_is_filled(write: Any, tmp_path: Path) -> None:
    value = large()
    del value["view"]
    write(value, tmp_path / "model.pt")
    target: Any = {
        name: torch.zeros_like(one, device="cuda") if name != "step" else 0
        for name, one in value.items()
    }
    addresses = {name: one.data_ptr() for name, one in target.items() if name != "step"}
    for _ in range(100):
        target["last"].add_(1)  # still in flight when the load begins
    found = ioshape.load(tmp_path / "model.pt", into=target)
    assert_same({name: one.cpu() if name != "step" else one for name, one in found.items()}, value)
    assert all(found[name].data_ptr() == address for name, address in addresses.items())


@pytest.mark.gpu
@WRITERS
@pytest.mark.parametrize("where", ["cuda", "cuda:0", {"cpu": "cuda:0"}])
def test_a_load_to_a_gpu_uses_pinned_memory(
    where: Any, write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = large()
    write(value, tmp_path / "model.pt")
    brought: list[int] = []
    copy = _stream._Stream.copy

    def counted(self: Any, into: torch.Tensor, source: torch.Tensor) -> None:
        assert into.is_cuda
        assert source.is_pinned()
        brought.append(into.numel())
        copy(self, into, source)

    monkeypatch.setattr(_stream._Stream, "copy", counted)
    found = ioshape.load(tmp_path / "model.pt", map_location=where)
    assert sum(brought) == storage_bytes(value)
    assert_same(found, torch.load(tmp_path / "model.pt", map_location=where))


@pytest.mark.gpu
@WRITERS
def test_damage_is_found_on_the_way_to_a_gpu(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    write({"weight": zoo.filled(torch.uint8, 40 * MIB)}, path)
    flip(path, offset_of(path, "data/0") + 38 * MIB)
    with pytest.raises(ioshape.DamagedError, match="'weight'"):
        ioshape.load(path, map_location="cuda")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_safetensors_file_goes_to_a_gpu(tmp_path: Path) -> None:
    value = {"a": zoo.filled(torch.float32, 300, 1031), "c": zoo.filled(torch.uint8, 18 * MIB + 3)}
    save_file(value, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors", device="cuda")
    assert all(one.is_cuda for one in found.values())
    assert_same({name: one.cpu() for name, one in found.items()}, value)
