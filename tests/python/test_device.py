# SPDX-License-Identifier: Apache-2.0
"""Storages of a GPU go through another path: they are fetched piece by piece into staging memory.

Where there is no GPU, storages of the CPU take that path here, so that all of it runs but the copy
from the device itself.
"""

import gc
import io
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
import zoo
from ioshape._native import ffi
from ioshape._save import device as _device
from ioshape._save import pickling
from ioshape._settings import config
from records import names_in
from same import assert_same, describe
from stock import SURROUNDINGS, attempt, stock

MIB = 1 << 20


class _Elsewhere:
    """The kind of device that storages seem to be on."""

    type = "elsewhere"


class Remote:
    """A storage of the CPU that seems to be on a device."""

    device = _Elsewhere()

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def nbytes(self) -> int:
        return self.storage.nbytes()

    def data_ptr(self) -> int:
        raise AssertionError("nobody can read the memory of a device")


class Couriers:
    """What was fetched, and how."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.threads: set[str] = set()
        self.fails_at: int | None = None


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Couriers:
    """All storages seem to be on a device."""
    seen = Couriers()
    collect = pickling.collect

    def collect_remote(*arguments: Any) -> Any:
        pickled = collect(*arguments)
        if not pickled.has_device_storages and any(one.storage for one in pickled.records):
            raise AssertionError("torch copied the storages itself")
        for record in pickled.records:
            if record.storage is not None:
                record.storage = Remote(record.storage)  # type: ignore[assignment]
        return pickled

    class Courier(_device.Courier):
        def __init__(self, storage: Any) -> None:
            super().__init__(storage.storage)

        def fetch(self, offset: int, into: Any, n_bytes: int) -> None:
            seen.pieces.append(n_bytes)
            seen.threads.add(threading.current_thread().name)
            if seen.fails_at is not None and sum(seen.pieces) > seen.fails_at:
                raise torch.AcceleratorError("the device is gone", 1)
            super().fetch(offset, into, n_bytes)

    monkeypatch.setattr(pickling, "_on_device", lambda _storage: True)
    monkeypatch.setattr(pickling, "collect", collect_remote)
    monkeypatch.setattr(_device, "Courier", Courier)
    return seen


@pytest.fixture
def little_staging() -> Iterator[None]:
    """The least that can be set."""
    before = dict(config._configured)
    ioshape.configure(staging_bytes=16 * MIB)
    yield
    config.reset()
    if before:
        ioshape.configure(**before)


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
    remote: Couriers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(_device, "PIECE_BYTES", piece_bytes)
    value = state()
    saved(value, tmp_path / "fetched.pt", background)
    records = ioshape.inspect(tmp_path / "fetched.pt").records
    storages = [record.n_bytes for record in records if record.name.startswith("data/")]
    assert sum(remote.pieces) == sum(storages) > 4 * MIB
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
    assert report.record_bytes > 60 * MIB
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


@pytest.mark.usefixtures("little_staging")
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_memory_may_hold_more_than_the_staging_memory(background: bool, tmp_path: Path) -> None:
    value = [zoo.filled(torch.uint8, 40 * MIB + 13), zoo.filled(torch.int32, 5 * MIB)]
    saved(value, tmp_path / "model.pt", background)
    assert_same(ioshape.load(tmp_path / "model.pt"), value)


@pytest.mark.usefixtures("little_staging")
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("fails_at", [0, 3 * MIB, 39 * MIB])
def test_a_device_that_fails_fails_the_save(
    fails_at: int, background: bool, remote: Couriers, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    remote.fails_at = fails_at
    with pytest.raises(torch.AcceleratorError, match="the device is gone"):
        saved([zoo.filled(torch.uint8, 40 * MIB)], path, background)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["model.pt"]
    remote.fails_at = None
    saved([torch.arange(5)], path, background)  # and nothing of it is left for the next
    assert_same(ioshape.load(path), [torch.arange(5)])


@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("surroundings", [name for name in SURROUNDINGS if "fake" not in name])
def test_a_device_is_saved_wherever_the_call_is(
    surroundings: str, background: bool, remote: Couriers, tmp_path: Path
) -> None:
    """Also where new tensors would be made somewhere else."""
    value = [zoo.filled(torch.float32, 500_000), torch.arange(3)]
    with SURROUNDINGS[surroundings]():
        saved(value, tmp_path / "model.pt", background)
    assert remote.pieces
    assert_same(torch.load(tmp_path / "model.pt"), value)


def test_threads_that_fetch_are_not_kept(remote: Couriers, tmp_path: Path) -> None:
    saved([zoo.filled(torch.uint8, 5 * MIB)], tmp_path / "model.pt", background=False)
    assert any(name.startswith("Dummy") for name in remote.threads)
    assert not [one for one in threading.enumerate() if one.name in remote.threads - {"MainThread"}]


@pytest.mark.usefixtures("remote")
def test_the_device_may_change_once_the_background_has_it(tmp_path: Path) -> None:
    value = torch.arange(3_000_000)
    handle = ioshape.save_async(value, tmp_path / "model.pt")
    value.zero_()
    handle.wait()
    assert_same(ioshape.load(tmp_path / "model.pt"), torch.arange(3_000_000))


def test_skipped_data_of_a_device_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pickling, "_on_device", lambda _storage: True)
    with torch.serialization.skip_data():
        report = ioshape.save({"weight": torch.ones(1000)}, tmp_path / "model.pt")
    assert report.written_by == "torch"
    assert not torch.load(tmp_path / "model.pt")["weight"].any()


def test_without_the_byteorder_of_python_a_device_is_saved_as_well(
    remote: Couriers, tmp_path: Path
) -> None:
    value = state()
    report = ioshape.save(value, tmp_path / "model.pt", _disable_byteorder_record=True)
    assert report.written_by == "ioshape"
    assert remote.pieces
    assert_same(ioshape.load(tmp_path / "model.pt", weights_only=False), value)


# ---- The same with a real one -------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@needs_gpu
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


@needs_gpu
def test_a_gpu_may_change_once_the_background_has_it(tmp_path: Path) -> None:
    """Also what its stream is still computing when the save begins is what is saved."""
    value = torch.zeros(50_000_000, device="cuda")
    for _ in range(100):
        value += 1
    handle = ioshape.save_async(value, tmp_path / "model.pt")
    value.zero_()
    handle.wait()
    assert bool((ioshape.load(tmp_path / "model.pt", map_location="cpu") == 100).all())


@needs_gpu
@pytest.mark.usefixtures("little_staging")
def test_a_gpu_may_hold_more_than_the_staging_memory(tmp_path: Path) -> None:
    value = torch.arange(30 * MIB, device="cuda", dtype=torch.int32)
    handle = ioshape.save_async(value, tmp_path / "model.pt")
    value.zero_()
    handle.wait()
    expected = torch.arange(30 * MIB, dtype=torch.int32)
    assert torch.equal(ioshape.load(tmp_path / "model.pt", map_location="cpu"), expected)


class SavesWhileItIsPickled:
    """As some libraries' objects do: it has a pickle of its own inside."""

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
    to_a_path: bool, remote: Couriers, tmp_path: Path
) -> None:
    inner = SavesWhileItIsPickled(tmp_path / "inner.pt" if to_a_path else None)
    value = {"a": torch.zeros(3), "inner": inner, "b": torch.ones(2)}
    ioshape.save(value, tmp_path / "model.pt")
    assert remote.pieces
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(loaded, {"a": torch.zeros(3), "inner": inner.tensor, "b": torch.ones(2)})


def test_a_device_storage_is_let_go_when_it_has_been_fetched() -> None:
    storage = torch.ones(100).untyped_storage()
    courier = _device.Courier(storage)
    into = bytearray(storage.nbytes())
    courier.fetch(0, ffi.from_buffer(into), len(into))
    assert bytes(into) == bytes(storage)
    assert courier._source is None
    gone = weakref.ref(courier)
    gc.disable()
    try:
        del courier
        assert gone() is None
    finally:
        gc.enable()
