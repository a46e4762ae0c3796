# SPDX-License-Identifier: Apache-2.0
"""The arguments of ioshape.save besides the object: it accepts and refuses what torch.save does."""

import copyreg
import ctypes
import gzip
import importlib
import io
import os
import pickle
import pickletools
import random
import re
import signal
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import ioshape
import pytest
import torch
import zoo
from records import names_in, offset_of
from same import assert_same, describe
from stock import SURROUNDINGS, attempt, stock, torch_setting
from torch._subclasses.fake_tensor import FakeTensorMode

STATE = {"weight": torch.arange(1000.0).reshape(10, 100), "note": "x", "half": torch.ones(3)}

OLD = b"the previous checkpoint"


def in_background(obj: Any, f: Any, *arguments: Any, **named: Any) -> ioshape.Report:
    return ioshape.save_async(obj, f, *arguments, **named).result()


Save = Callable[..., ioshape.Report]


@pytest.fixture(params=[ioshape.save, in_background], ids=["save", "save_async"])
def save(request: pytest.FixtureRequest) -> Save:
    chosen: Save = request.param
    return chosen


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the class and the message of an exception, without addresses."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, re.sub(r"0x[0-9a-f]+", "ADDRESS", str(error))
    raise AssertionError("nothing was raised")


def torch_loads(path: Path) -> Any:
    """Return a description of a file as stock torch loads it."""
    outcome = stock().load(path)
    assert outcome.error is None, outcome.error
    return outcome.description


# ---- Objects that cannot be saved ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", zoo.not_picklable())
def test_what_cannot_be_pickled_fails_as_in_torch(name: str, save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(OLD)
    value = zoo.not_picklable()[name]()
    expected = error_of(lambda: torch.save(value, io.BytesIO()))
    assert error_of(lambda: save({"good": torch.arange(5), "bad": value}, path)) == expected
    assert path.read_bytes() == OLD
    assert names_in(tmp_path) == ["model.pt"]


def test_the_background_says_at_once_what_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        ioshape.save_async(lambda: 1, tmp_path / "model.pt")
    ioshape.save(STATE, tmp_path / "next.pt")  # does not raise the failure again


def test_after_a_failure_the_next_save_is_right(save: Save, tmp_path: Path) -> None:
    """Check that no storage of the failed save is left over."""
    with pytest.raises(ZeroDivisionError):
        save([torch.arange(9), zoo.not_picklable()["its own error"]()], tmp_path / "model.pt")
    save(STATE, tmp_path / "model.pt")
    assert torch_loads(tmp_path / "model.pt") == describe(STATE)


# ---- Targets -------------------------------------------------------------------------------------


class NotAFile:
    """An object with a `write` that cannot be called."""

    write = "no function"


class OnlyWrites:
    """A file object with only the methods that torch needs."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)

    def flush(self) -> None:
        pass


class BytesPath:
    """A path as bytes, which torch does not accept."""

    def __fspath__(self) -> bytes:
        return b"model.pt"


def closed_file() -> Any:
    with tempfile.TemporaryFile() as file:
        return file


def text_file() -> Any:
    return tempfile.TemporaryFile("w")


def closed_bytes() -> Any:
    with io.BytesIO() as file:
        return file


@pytest.mark.parametrize("target", [None, 5, b"model.pt", ["model.pt"], Path], ids=repr)
@pytest.mark.parametrize("call", [ioshape.save, ioshape.save_async])
def test_what_is_no_target_is_refused(call: Any, target: Any) -> None:
    """Check values of other types: torch fails because they lack an attribute."""
    with pytest.raises(TypeError):
        call(STATE, target)


def test_the_background_takes_paths_only() -> None:
    with pytest.raises(TypeError):
        ioshape.save_async(STATE, io.BytesIO())  # type: ignore[arg-type]


WRONG_TARGETS: dict[str, Callable[[], Any]] = {
    "path of bytes": BytesPath,
    "not a file": NotAFile,
    "closed file": closed_file,
    "closed bytes": closed_bytes,
    "text": io.StringIO,
    "text file": text_file,
    "empty name": lambda: "",
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_wrong_targets_raise_what_torch_raises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        torch.save(STATE, WRONG_TARGETS[name]())
    with pytest.raises(type(expected.value)) as raised:
        ioshape.save(STATE, WRONG_TARGETS[name]())
    # Our errors of files say more. For paths as bytes ours have the message that torch has for
    # bytes.
    if not isinstance(raised.value, ioshape.StorageError) and name != "path of bytes":
        assert str(raised.value) == str(expected.value)
    assert names_in(tmp_path) == []


def test_a_name_that_no_file_can_have_is_refused(save: Save, tmp_path: Path) -> None:
    """Check a name with a NUL: torch.save would write to the name before it."""
    with pytest.raises(ValueError, match="null"):
        save(STATE, f"{tmp_path}/a\0b")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((STATE,), {}), ((STATE, "x"), {"nonsense": 1}), ((STATE, "x"), {"f": "y"})],
)
def test_wrong_calls_raise_what_torch_raises(arguments: Any, named: Any) -> None:
    assert error_of(lambda: ioshape.save(*arguments, **named)) == error_of(
        lambda: torch.save(*arguments, **named)
    )


def open_file(folder: Path) -> Any:
    return (folder / "file.pt").open("w+b")


FILE_OBJECTS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda _: io.BytesIO(),
    "file": open_file,
    "unbuffered": lambda folder: (folder / "raw.pt").open("w+b", buffering=0),
    "spooled": lambda _: tempfile.SpooledTemporaryFile(max_size=100),  # noqa: SIM115
}


@pytest.mark.parametrize("name", FILE_OBJECTS)
@pytest.mark.parametrize("new_format", [True, False])
def test_torch_itself_writes_to_file_objects(name: str, new_format: bool, tmp_path: Path) -> None:
    with FILE_OBJECTS[name](tmp_path) as file:
        report = ioshape.save(STATE, file, _use_new_zipfile_serialization=new_format)
        file.seek(0)
        assert_same(torch.load(file), STATE)
        file.seek(0)
        assert_same(ioshape.load(file), STATE)
    assert report.written_by == "torch"
    assert any("neither atomic nor durable" in note for note in report.downgrades)


def test_gzip_files_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt.gz"
    with gzip.open(path, "wb") as file:
        assert ioshape.save(STATE, cast("Any", file)).written_by == "torch"
    with gzip.open(path, "rb") as file:
        assert_same(ioshape.load(cast("Any", file)), STATE)


def test_writing_goes_on_where_the_file_object_is() -> None:
    file = io.BytesIO()
    file.write(b"before")
    ioshape.save(STATE, file, _use_new_zipfile_serialization=False)
    ioshape.save([1], file, _use_new_zipfile_serialization=False)
    file.seek(len(b"before"))
    assert_same(ioshape.load(file), STATE)
    assert ioshape.load(file) == [1]


def test_the_least_of_a_file_is_enough() -> None:
    file = OnlyWrites()
    ioshape.save(STATE, file)  # type: ignore[arg-type]
    assert_same(torch.load(io.BytesIO(file.data)), STATE)


def test_an_error_of_the_file_object_is_that_of_torch() -> None:
    class Full(OnlyWrites):
        def write(self, _data: bytes) -> int:
            raise OSError(28, "No space left on device")

    assert error_of(lambda: ioshape.save(STATE, Full())) == error_of(  # type: ignore[arg-type]
        lambda: torch.save(STATE, Full())  # type: ignore[arg-type]
    )


NAMES = [
    "model",
    "model.tar.pt",
    "ümläut 漢字 🙂.pt",
    "with spaces and 'quotes'",
    "-dash",
    "new\nline",
    "%s%d{}",
    os.fsdecode(b"not \xff utf-8.pt"),
    "x" * 255,
    "ä" * 127 + "x",
    "data",
    ".hidden",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:40])
def test_every_name_that_the_filesystem_takes(name: str, save: Save, tmp_path: Path) -> None:
    path = tmp_path / name
    report = save(STATE, path)
    assert (report.path, report.written_by) == (str(path), "ioshape")
    assert names_in(tmp_path) == [name]
    assert torch_loads(path) == describe(STATE)
    assert_same(ioshape.load(path), STATE)


class OwnPath:
    """A foreign class that is a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("kind", [str, Path, OwnPath])
def test_every_kind_of_path(kind: Any, save: Save, tmp_path: Path) -> None:
    save(STATE, kind(tmp_path / "model.pt"))
    assert_same(ioshape.load(kind(tmp_path / "model.pt")), STATE)


def test_relative_paths_are_relative_to_where_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    ioshape.save(STATE, "a.pt")
    ioshape.save(STATE, Path("folder") / ".." / "b.pt")
    assert_same(ioshape.load("a.pt"), STATE)
    assert_same(ioshape.load("b.pt"), STATE)


def test_names_inside_the_file_do_not_depend_on_the_file(tmp_path: Path) -> None:
    """Check that two saves of one object have equal bytes, whatever their names."""
    ioshape.save(STATE, tmp_path / "a.pt")
    ioshape.save(STATE, tmp_path / "another name.tar")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "another name.tar").read_bytes()


# ---- Protocols and pickle modules ----------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5, -1])
def test_every_protocol(protocol: int, save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    value = {"state": STATE, "objects": zoo.build("classes_of_ours"), "text": "ümläut"}
    report = save(value, path, pickle_protocol=protocol)
    assert report.written_by == "ioshape"
    assert torch_loads(path) == describe(value)
    assert_same(ioshape.load(path, weights_only=False), value)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        first = next(pickletools.genops(archive.read(name)))
    assert first[1] == (protocol if protocol > 0 else pickle.HIGHEST_PROTOCOL)


@pytest.mark.parametrize("protocol", [0, 1, 6, 99, "2", None, 2.0])
def test_protocols_that_torch_refuses(protocol: Any, save: Save, tmp_path: Path) -> None:
    def call(function: Callable[..., object], target: Any) -> Any:
        return attempt(lambda: bool(function(STATE, target, pickle_protocol=protocol)), tmp_path)

    ours = call(save, tmp_path / "model.pt")
    theirs = call(torch.save, io.BytesIO())
    assert ours.error == theirs.error
    assert (tmp_path / "model.pt").exists() == (theirs.error is None)


def own_pickle_module() -> Any:
    """Return a pickle module that pickles namespaces as dictionaries and records all types."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            module.seen.append(type(value))
            if isinstance(value, types.SimpleNamespace):
                return dict, (vars(value),)
            return NotImplemented

    module: Any = types.ModuleType("own_pickle")
    module.seen = []
    module.Pickler, module.Unpickler = Pickler, pickle.Unpickler
    module.dump, module.load = pickle.dump, pickle.load
    return module


def test_the_pickle_module_is_the_one_that_pickles(save: Save, tmp_path: Path) -> None:
    module = own_pickle_module()
    report = save([types.SimpleNamespace(a=1), torch.arange(3)], tmp_path / "m.pt", module)
    assert report.written_by == "ioshape"
    assert types.SimpleNamespace in module.seen
    assert torch_loads(tmp_path / "m.pt") == describe([{"a": 1}, torch.arange(3)])
    loaded = ioshape.load(tmp_path / "m.pt", pickle_module=module, weights_only=False)
    assert loaded[0] == {"a": 1}


def test_python_own_pickler_serves_as_well(save: Save, tmp_path: Path) -> None:
    module: Any = types.ModuleType("slow_pickle")
    module.Pickler, module.Unpickler = pickle._Pickler, pickle._Unpickler
    save(STATE, tmp_path / "model.pt", pickle_module=module)
    assert torch_loads(tmp_path / "model.pt") == describe(STATE)


@pytest.mark.parametrize("name", ["dill", "cloudpickle"])
def test_other_pickle_modules(name: str, save: Save, tmp_path: Path) -> None:
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    save({"function": lambda x: x + 1, "state": STATE}, tmp_path / "model.pt", module)
    # cloudpickle has no Unpickler: the module pickle reads its pickles.
    reader = module if hasattr(module, "Unpickler") else pickle
    loaded = ioshape.load(tmp_path / "model.pt", pickle_module=reader, weights_only=False)
    assert loaded["function"](2) == 3
    assert_same(loaded["state"], STATE)


def module_without_pickler() -> Any:
    return types.ModuleType("nothing")


def old_dill() -> Any:
    module: Any = types.ModuleType("dill")
    module.__version__ = "0.3.0"
    module.Pickler = pickle.Pickler
    return module


@pytest.mark.parametrize("make", [module_without_pickler, old_dill, lambda: None, lambda: 5])
def test_wrong_pickle_modules_raise_what_torch_raises(
    make: Callable[[], Any], save: Save, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    assert error_of(lambda: save(STATE, path, pickle_module=make())) == error_of(
        lambda: torch.save(STATE, io.BytesIO(), pickle_module=make())
    )
    assert names_in(tmp_path) == []


# ---- torch's options -----------------------------------------------------------------------------


def by_position(save: Save, value: Any, path: Path, new_format: bool, no_byteorder: bool) -> Any:
    if save is ioshape.save:
        return save(value, path, pickle, 2, new_format, no_byteorder)
    return save(value, path, pickle, 2, _disable_byteorder_record=no_byteorder)


def test_the_byteorder_is_always_known(save: Save, tmp_path: Path) -> None:
    """Check files without Python's byteorder record, which torch's C++ code adds at the end."""
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    by_position(save, STATE, ours, True, True)
    torch.save(STATE, theirs, pickle, 2, True, True)
    big = torch.serialization.LoadEndianness.BIG
    with torch_setting("load.endianness", big):
        assert_same(torch.load(theirs), STATE)
        assert_same(torch.load(ours), STATE)
        assert_same(ioshape.load(theirs), STATE)


def records_in(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return [name.split("/", 1)[1] for name in archive.namelist()]


@pytest.mark.parametrize("name", ["whole_checkpoint", "views_of_one_storage", "python_objects"])
def test_the_format_from_before_is_written_by_torch(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(OLD)
    value = zoo.build(name)
    report = ioshape.save(value, path, _use_new_zipfile_serialization=False)
    assert report.written_by == "torch"
    assert any("before torch 1.6" in note for note in report.downgrades)
    assert report.file_bytes == path.stat().st_size
    assert not zipfile.is_zipfile(path)
    assert names_in(tmp_path) == ["model.pt"]
    assert torch_loads(path) == describe(value)
    assert_same(ioshape.load(path, weights_only=False), value)


def test_the_format_from_before_fails_like_torch_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(OLD)

    def error_with(save: Any, value: object, target: Any) -> tuple[str, str]:
        return error_of(lambda: save(value, target, _use_new_zipfile_serialization=False))

    for value in (lambda: 1, zoo.build("storage_of_two_dtypes")):
        expected = error_with(torch.save, value, io.BytesIO())
        assert error_with(ioshape.save, value, path) == expected
    assert path.read_bytes() == OLD
    assert names_in(tmp_path) == ["model.pt"]


def test_skipped_data_are_skipped_by_torch(save: Save, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    with torch.serialization.skip_data():
        report = save(STATE, ours)
        torch.save(STATE, theirs)
    assert report.written_by == "torch"
    assert any("skipped" in note for note in report.downgrades)
    assert records_in(ours) == records_in(theirs)
    assert torch_loads(ours) == torch_loads(theirs)
    assert_same(ioshape.load(ours), torch.load(theirs))
    with pytest.raises(RuntimeError, match="skip_data"), torch.serialization.skip_data():
        ioshape.save(STATE, ours, _use_new_zipfile_serialization=False)


def test_fake_tensors_made_real_are_saved_as_by_torch(save: Save, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        state = torch.nn.Linear(30, 40).state_dict()
        report = save(state, ours)
        torch.save(state, theirs)
    assert report.written_by == "torch"
    assert torch_loads(ours) == torch_loads(theirs)
    assert {name: tensor.shape for name, tensor in torch.load(ours).items()} == {
        "weight": (40, 30),
        "bias": (40,),
    }


def test_real_tensors_are_saved_where_new_ones_would_be_fake(save: Save, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    with FakeTensorMode():
        outcome = attempt(lambda: bool(save(STATE, ours)), ours)
        expected = attempt(lambda: torch.save(STATE, theirs), theirs)
    assert outcome.error == expected.error
    assert torch_loads(ours) == torch_loads(theirs) == describe(STATE)


def test_tensors_loaded_as_fake_are_saved_as_by_torch(save: Save, tmp_path: Path) -> None:
    """Check storages with a device of their own, which torch writes into the file."""
    source, ours, theirs = (tmp_path / name for name in ("source.pt", "ours.pt", "theirs.pt"))
    torch.save(STATE, source)
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        state = ioshape.load(source)
        save(state, ours)
        torch.save(state, theirs)
    assert torch_loads(ours) == torch_loads(theirs)


@pytest.mark.parametrize("alignment", [1, 8, 64, 100, 512, 4096, 65536])
def test_storages_lie_where_torch_was_asked_to_align_them(
    alignment: int, save: Save, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    value = [torch.arange(i + 1) for i in range(20)]
    with torch_setting("save.storage_alignment", alignment):
        save(value, path)
        outcomes = stock().load_all_ways(path)
        assert_same(ioshape.load(path), value)
    assert {way for way, outcome in outcomes.items() if outcome.error} == set()
    assert outcomes["whole"].description == describe(value)
    kept = min(alignment, 4096) if alignment & (alignment - 1) == 0 else 1
    for i in range(20):
        assert offset_of(path, f"data/{i}") % max(kept, 64) == 0


def test_checksums_are_written_whatever_torch_was_asked(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with torch_setting("save.compute_crc32", False):
        save(STATE, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert torch_loads(path) == describe(STATE)


def test_what_copyreg_knows_is_pickled_so(save: Save, tmp_path: Path) -> None:
    class Unnamed:
        pass

    def reduce(_unnamed: Unnamed) -> Any:
        return set, ((1, 2),)

    copyreg.pickle(Unnamed, reduce)
    try:
        save(Unnamed(), tmp_path / "model.pt")
    finally:
        del copyreg.dispatch_table[Unnamed]
    assert ioshape.load(tmp_path / "model.pt") == {1, 2}


def test_the_object_may_change_once_the_background_has_it(tmp_path: Path) -> None:
    state = {"weight": torch.arange(3_000_000.0), "list": [1]}
    handle = ioshape.save_async(state, tmp_path / "model.pt")
    state["weight"].zero_()  # type: ignore[attr-defined]
    state["list"].append(2)  # type: ignore[attr-defined]
    handle.wait()
    expected = {"weight": torch.arange(3_000_000.0), "list": [1]}
    assert_same(ioshape.load(tmp_path / "model.pt"), expected)


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_the_same_is_saved_wherever_the_call_is(
    surroundings: str, save: Save, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    value = {"weight": torch.arange(100_000.0), "view": torch.arange(9).reshape(3, 3).t()}
    with SURROUNDINGS[surroundings]():
        report = save(value, ours)
        torch.save(value, theirs)
    assert report.written_by == "ioshape"
    assert torch_loads(ours) == torch_loads(theirs) == describe(value)


def test_saving_changes_nothing_in_the_object(save: Save, tmp_path: Path) -> None:
    value = zoo.build("whole_checkpoint")
    before = describe(value)
    save(value, tmp_path / "model.pt")
    assert describe(value) == before


def test_other_packages_of_torch_are_asked_as_ever(save: Save, tmp_path: Path) -> None:
    """Check foreign storages: their tag is in the file, and their own way back is taken."""
    tagged: list[Any] = []

    def tag(storage: Any) -> str | None:
        tagged.append(storage)
        return "cpu" if storage.device.type == "cpu" else None

    registry: Any = torch.serialization._package_registry
    torch.serialization.register_package(5, tag, lambda _storage, _location: None)
    try:
        save(STATE, tmp_path / "model.pt")
    finally:
        registry[:] = [entry for entry in registry if entry[1] is not tag]
    assert len(tagged) == 2
    assert torch_loads(tmp_path / "model.pt") == describe(STATE)


def test_the_packages_of_torch_are_left_alone() -> None:
    """Check that ioshape registers no package.

    Torch sorts packages by priority and then by function, so equal priorities raise an error.
    """
    registry: Any = torch.serialization._package_registry
    importlib.import_module("ioshape._save.save")
    functions = [getattr(entry[1], "func", entry[1]) for entry in registry]
    assert {function.__module__ for function in functions} == {"torch.serialization"}


def test_memory_that_another_process_changes_meanwhile_gives_a_valid_file(tmp_path: Path) -> None:
    # As in Hogwild trainings. A save that wrote the memory itself would have checksums of bytes
    # that are gone when the kernel reads them.
    weights = torch.zeros(32 << 18)  # 32 MiB
    weights.share_memory_()  # type: ignore[no-untyped-call]
    child = os.fork()
    if not child:
        memory = (ctypes.c_char * weights.nbytes).from_address(weights.data_ptr())
        while os.getppid() != 1:
            ctypes.memset(memory, random.randrange(256), weights.nbytes)
        os._exit(0)
    try:
        for _ in range(4):
            ioshape.save({"weights": weights}, tmp_path / "weights.pt")
            assert ioshape.load(tmp_path / "weights.pt")["weights"].shape == weights.shape
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
