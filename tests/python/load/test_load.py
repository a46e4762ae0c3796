# SPDX-License-Identifier: Apache-2.0
"""ioshape.load behaves as torch.load for every format, every argument and every mistake."""

import contextlib
import ctypes
import gc
import gzip
import inspect
import io
import os
import pickle
import struct
import tarfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ioshape
import pytest
import safetensors.torch
import torch
import zoo
from ioshape._load.reader import Reader
from records import flip, offset_of
from same import assert_same, describe
from stock import (
    SURROUNDINGS,
    WAYS,
    Outcome,
    attempt,
    environment,
    load_all_ways,
    stock,
    torch_setting,
)
from torch._subclasses.fake_tensor import FakeTensorMode

STATE = {"weight": torch.arange(1000.0).reshape(10, 100), "note": "x", "half": torch.ones(3)}


def assert_outcomes_equal(load: Callable[..., Any], path: Path, **options: Any) -> Outcome:
    """Check that a load has the result, error and warnings of torch.load, and return them."""
    expected = attempt(lambda: torch.load(path, **options), path)
    assert attempt(lambda: load(path, **options), path) == expected
    return expected


def assert_all_ways_equal(path: Path, but: str = "") -> dict[str, Outcome]:
    expected = stock().load_all_ways(path)
    found = load_all_ways(ioshape.load, path)
    for way in expected.keys() - {but}:
        assert found[way] == expected[way], way
    return expected


def failed(outcomes: dict[str, Outcome]) -> set[str]:
    return {way for way, outcome in outcomes.items() if outcome.error}


# ---- Formats -------------------------------------------------------------------------------------

MAPPED = {way for way in WAYS if way.startswith("mapped")}


@pytest.mark.parametrize("name", ["views_of_one_storage", "whole_checkpoint", "python_objects"])
@pytest.mark.slow
def test_the_format_from_before_torch_1_6(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(zoo.build(name), path, _use_new_zipfile_serialization=False)
    assert failed(assert_all_ways_equal(path)) >= MAPPED
    assert_same(ioshape.load(path, weights_only=False), zoo.build(name))


def write_tar(path: Path) -> list[torch.Tensor]:
    """Write the oldest format, a tar archive. torch still reads it, but no longer writes it."""
    values = torch.arange(12.0)

    def pickled(*objects: object) -> bytes:
        return b"".join(pickle.dumps(value, protocol=2) for value in objects)

    storages = pickled(1, (7, "cpu", torch.FloatStorage))
    storages += struct.pack("<q", 12) + values.numpy().tobytes() + pickled([])
    tensors = pickled(2)
    for key, shape, offset in ((8, (3, 4), 0), (9, (2,), 5)):
        strides = torch.empty(shape).stride()
        tensors += pickled((key, 7, torch.FloatTensor))
        tensors += struct.pack("<ii", len(shape), 0)
        tensors += struct.pack(f"<{2 * len(shape) + 1}q", *shape, *strides, offset)

    # In pickles before protocol 2, references are plain strings.
    content = b"(lp0\nP8\naP9\na."
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("storages", storages), ("tensors", tensors), ("pickle", content)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return [values.reshape(3, 4), values[5:7]]


def test_the_tar_format(tmp_path: Path) -> None:
    expected = write_tar(tmp_path / "model.tar")
    outcomes = assert_all_ways_equal(tmp_path / "model.tar")
    assert {"safe", "default"} | MAPPED <= failed(outcomes)
    assert "whole" not in failed(outcomes)
    loaded = ioshape.load(tmp_path / "model.tar", weights_only=False)
    assert torch.equal(loaded[0], expected[0])
    assert torch.equal(loaded[1], expected[1])
    loaded[0].zero_()
    assert not loaded[1].any()


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_torchscript_archives(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 4)), path)
    for options in ({}, {"weights_only": True}, {"weights_only": False, "mmap": True}):
        with pytest.warns(UserWarning, match="looks like a TorchScript archive"):
            outcome = attempt_only(ioshape.load, path, **options)
        with pytest.warns(UserWarning, match="looks like a TorchScript archive"):
            assert outcome == attempt_only(torch.load, path, **options)
    with pytest.warns(UserWarning, match="looks like a TorchScript archive"):
        module = ioshape.load(path, weights_only=False)
    assert isinstance(module, torch.jit.ScriptModule)
    jit: Any = torch.jit
    assert_same(module.state_dict(), jit.load(path).state_dict())


def attempt_only(load: Callable[..., Any], path: object, **options: Any) -> tuple[str, str] | None:
    try:
        load(path, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    safetensors.torch.save_file(tensors, path)
    assert_same(ioshape.load(path), tensors)
    assert_same(ioshape.load(str(path), map_location="cpu"), tensors)
    for where in ({"cpu": "cpu"}, lambda storage, _location: storage):
        assert attempt_only(ioshape.load, path, map_location=where) == attempt_only(
            torch.load, path, map_location=where
        )
    missing = tmp_path / "missing.safetensors"
    assert attempt_only(ioshape.load, missing) == attempt_only(torch.load, missing)


def test_a_torch_zip_by_the_name_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ioshape.save(STATE, path)
    assert attempt_only(ioshape.load, path) == attempt_only(torch.load, path)
    assert ioshape.inspect(path).tensors
    ioshape.verify(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("write", [torch.save, ioshape.save])
def test_archives_that_were_packed_anew(
    write: Callable[..., Any], compression: int, tmp_path: Path
) -> None:
    original, path = tmp_path / "original.pt", tmp_path / "packed.pt"
    write(STATE, original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    # torch gets a copy of a compressed archive, and compares offsets of records with that copy.
    assert_all_ways_equal(path, but="checked by torch" if compression else "")
    assert_same(ioshape.load(path), STATE)


def test_bytes_in_the_other_order_are_swapped(tmp_path: Path) -> None:
    original, path = tmp_path / "original.pt", tmp_path / "big.pt"
    ioshape.save(STATE, original)
    with zipfile.ZipFile(original) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, b"big" if name.endswith("byteorder") else source.read(name))
    outcome = assert_outcomes_equal(ioshape.load, path)
    assert outcome.description != describe(STATE)


@pytest.mark.parametrize("member", ["folder/readme.txt", "readme.txt"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("verify", [True, False])
def test_a_zip_that_is_not_of_torch(
    verify: bool, compression: int, member: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(member, "hello" * 100)
    error = raised_by(lambda: ioshape.load(path, verify=verify))
    assert isinstance(error, ioshape.errors.FormatError)
    assert (error.path, error.operation) == (str(path), "load")
    assert error.remedy


@pytest.mark.parametrize(
    "content",
    [b"\x80", b"\x80\2.", b"text\n", b"text", bytes(10), b"\xff" * 3000, b"PK\1\2" + bytes(100)],
)
def test_files_that_are_nothing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    outcomes = assert_all_ways_equal(path)
    assert failed(outcomes) == set(WAYS)


@pytest.mark.parametrize("content", [b"", b"P", b"PK", b"PK\3\4", b"PK\3\4" + bytes(100)])
def test_files_of_which_little_is_left(content: bytes, tmp_path: Path) -> None:
    """Check that such files count as damaged, whatever format torch takes them for."""
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    error = raised_by(lambda: ioshape.load(path))
    assert isinstance(error, ioshape.DamagedError)
    with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)):
        torch.load(path)


@pytest.mark.wording
@pytest.mark.parametrize(("content", "word"), [(b"", "empty"), (b"PK\3\4", "truncated")])
def test_what_is_left_of_a_file_is_said(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert word in str(raised_by(lambda: ioshape.load(path)))


def test_errors_of_torch_come_alone(tmp_path: Path) -> None:
    """Check that errors of torch do not mention our own attempt to read the file."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"text")
    with pytest.raises(IndexError) as raised:  # an error of the legacy format's reader
        ioshape.load(path)
    error: BaseException | None = raised.value
    while error is not None:
        assert not isinstance(error, ioshape.StorageError)
        error = error.__context__


def test_what_is_no_checkpoint_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps({"plain": "pickle"}, protocol=2))
    assert failed(assert_all_ways_equal(path)) == set(WAYS)


# ---- Arguments -----------------------------------------------------------------------------------


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    ioshape.save(STATE, path)
    return path


@pytest.fixture
def unsafe(tmp_path: Path) -> Path:
    """Save a file that weights_only=True refuses, and return its path."""
    path = tmp_path / "unsafe.pt"
    ioshape.save({"config": zoo.Config("x", [1]), "weight": torch.ones(3)}, path)
    return path


def test_the_signatures_begin_as_those_of_torch() -> None:
    for own, theirs in ((ioshape.save, torch.save), (ioshape.load, torch.load)):
        expected = [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(theirs).parameters.values()
        ]
        found = [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(own).parameters.values()
        ]
        assert [entry for entry in found if entry in expected] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"pickle_module": pickle},
        {"pickle_module": pickle, "weights_only": True},
        {"pickle_module": pickle, "weights_only": False},
        {"weights_only": False, "encoding": "ascii"},
        {"weights_only": False, "errors": "replace", "fix_imports": False},
        {"weights_only": True, "encoding": "ascii"},
        {"weights_only": False, "nonsense": 1},
        {"map_location": 5},
        {"map_location": "nowhere"},
        {"map_location": "cuda:77"},
        {"map_location": b"cpu"},
        {"map_location": {"cpu": "cuda:77"}},
        pytest.param({"map_location": lambda _storage, _location: None}, id="map to function"),
        {"mmap": "yes"},
        {"weights_only": 1},
        {"mmap": True, "map_location": "meta"},
    ],
    ids=str,
)
def test_every_argument_has_its_effect(options: dict[str, Any], ours: Path, unsafe: Path) -> None:
    for path in (ours, unsafe):
        assert_outcomes_equal(ioshape.load, path, **options)


def test_arguments_may_be_given_by_position(unsafe: Path) -> None:
    assert_same(
        ioshape.load(unsafe, "cpu", pickle, weights_only=False),
        torch.load(unsafe, "cpu", pickle, weights_only=False),
    )
    with pytest.raises(TypeError) as expected:
        torch.load()  # type: ignore[call-arg]
    with pytest.raises(TypeError) as raised:
        ioshape.load()  # type: ignore[call-arg]
    assert str(raised.value) == str(expected.value)


class CountingUnpickler(pickle.Unpickler):
    """An unpickler that records every class of the pickle."""

    seen: list[str] = []  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        self.seen.append(name)
        return super().find_class(module, name)


def test_the_pickle_module_is_the_one_that_unpickles(unsafe: Path) -> None:
    module: Any = types.ModuleType("counting")
    module.Unpickler, module.load = CountingUnpickler, pickle.load
    CountingUnpickler.seen.clear()
    ioshape.load(unsafe, pickle_module=module, weights_only=False)
    assert "Config" in CountingUnpickler.seen


def test_the_pickle_module_unpickles_a_shard_that_fills_tensors(tmp_path: Path) -> None:
    ioshape.save_group({"weight": torch.ones(9)}, tmp_path, 1)
    module: Any = types.ModuleType("counting")
    module.Unpickler, module.load = CountingUnpickler, pickle.load
    CountingUnpickler.seen.clear()
    into = {"weight": torch.zeros(9)}
    ioshape.load_group(tmp_path, pickle_module=module, weights_only=False, into=into)
    assert "_rebuild_tensor_v2" in CountingUnpickler.seen
    assert torch.equal(into["weight"], torch.ones(9))


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"},
        {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "y", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "yes"},
        {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "nonsense"},
    ],
    ids=str,
)
def test_variables_of_torch_are_obeyed(variables: dict[str, str], unsafe: Path) -> None:
    with environment(**variables):
        outcomes = [
            assert_outcomes_equal(ioshape.load, unsafe, **options)
            for options in ({}, {"weights_only": True}, {"weights_only": False})
        ]
    assert any(outcome.error for outcome in outcomes)


def test_safe_globals_are_those_of_torch(unsafe: Path) -> None:
    refused = assert_outcomes_equal(ioshape.load, unsafe, weights_only=True)
    assert refused.error is not None
    assert "zoo.objects.Config" in refused.error[1]
    assert torch.serialization.get_unsafe_globals_in_checkpoint(unsafe) == ["zoo.objects.Config"]
    with torch.serialization.safe_globals([zoo.Config]):
        loaded = ioshape.load(unsafe)
    assert loaded["config"] == zoo.Config("x", [1])
    assert assert_outcomes_equal(ioshape.load, unsafe) == refused


def test_nothing_of_an_unsafe_file_is_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "evil.pt", tmp_path / "trace"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(trace),)

    torch.save({"evil": Evil(), "weight": torch.ones(2)}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        ioshape.load(path)
    ioshape.inspect(path)
    ioshape.verify(path)
    assert not trace.exists()
    ioshape.load(path, weights_only=False)
    assert trace.exists()


# ---- Mapped, meta, fake --------------------------------------------------------------------------


def test_mapped_files_are_mapped(ours: Path) -> None:
    loaded = ioshape.load(ours, mmap=True)
    assert_same(loaded, STATE)
    assert str(ours) in Path("/proc/self/maps").read_text(encoding="utf-8")
    before = ours.read_bytes()
    loaded["weight"].zero_()  # the write changes a private copy of the page
    assert ours.read_bytes() == before
    with torch.serialization.set_default_mmap_options(__import__("mmap").MAP_SHARED):
        ioshape.load(ours, mmap=True)["weight"].zero_()
    assert not torch.load(ours, mmap=True)["weight"].any()


def test_mapped_files_are_verified_on_request(ours: Path) -> None:
    flip(ours, offset_of(ours, "data/0") + 100)
    ioshape.load(ours, mmap=True)
    with torch_setting("load.mmap", True):
        ioshape.load(ours)
    with pytest.raises(ioshape.DamagedError, match="'weight'"):
        ioshape.load(ours, mmap=True, verify=True)
    with torch_setting("load.mmap", True), pytest.raises(ioshape.DamagedError, match="'weight'"):
        ioshape.load(ours, verify=True)


def test_what_cannot_be_mapped_fails_as_in_torch(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save(STATE, old, _use_new_zipfile_serialization=False)
    for target in (old, str(old), tmp_path / "missing.pt", tmp_path):
        assert attempt_only(ioshape.load, target, mmap=True) == attempt_only(
            torch.load, target, mmap=True
        )
    buffer = io.BytesIO()
    torch.save(STATE, buffer)

    def load_buffer(load: Callable[..., Any]) -> Any:
        buffer.seek(0)
        return attempt_only(load, buffer, mmap=True)

    assert load_buffer(ioshape.load) == load_buffer(torch.load)


def _storages(value: Any) -> dict[str, torch.UntypedStorage]:
    return {name: tensor.untyped_storage() for name, tensor in value.items()}


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
@pytest.mark.parametrize("write", [torch.save, ioshape.save])
@pytest.mark.parametrize("load", [torch.load, ioshape.load])
def test_storages_without_data_know_where_theirs_lie(
    load: Callable[..., Any], write: Callable[..., Any], fake: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    state = {f"{i}": zoo.filled(torch.uint8, i * i * 100 + 1) for i in range(30)}
    write(state, path)
    if fake:
        with FakeTensorMode():
            loaded = load(path)
    else:
        loaded = load(path, map_location="meta")
    content = path.read_bytes()
    for name, storage in _storages(loaded).items():
        begin = storage._checkpoint_offset
        assert begin is not None
        assert content[begin : begin + storage.nbytes()] == bytes(state[name].tolist())


# ---- File objects --------------------------------------------------------------------------------


class Unseekable(io.RawIOBase):
    """A stream without seek, like a socket."""

    def readable(self) -> bool:
        return True

    def read(self, _n_bytes: int = -1) -> bytes:
        return b""


@pytest.mark.parametrize(
    "make", [lambda: None, lambda: 5, lambda: b"model.pt", object, Unseekable, lambda: []]
)
def test_what_is_no_file_fails_as_in_torch(make: Callable[[], Any]) -> None:
    found, expected = attempt_only(ioshape.load, make()), attempt_only(torch.load, make())
    assert found is not None
    assert found == expected


def test_torch_itself_reads_file_objects(ours: Path, tmp_path: Path) -> None:
    with ours.open("rb") as file:
        assert_same(ioshape.load(file), STATE)
    assert_same(ioshape.load(io.BytesIO(ours.read_bytes())), STATE)
    with gzip.open(tmp_path / "model.pt.gz", "wb") as packed:
        packed.write(ours.read_bytes())
    with gzip.open(tmp_path / "model.pt.gz", "rb") as packed:
        assert_same(ioshape.load(packed), STATE)  # type: ignore[arg-type]


IN_CLOSE_NOWRITE, IN_OPEN = 0x10, 0x20


@contextlib.contextmanager
def counting_readers(path: Path) -> Iterator[list[int]]:
    """Count how often the file is opened for reading and closed, with inotify."""
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    # Openings are watched too, because inotify merges equal events in a row.
    assert libc.inotify_add_watch(watch, os.fsencode(path), IN_CLOSE_NOWRITE | IN_OPEN) > 0
    counted: list[int] = []
    yield counted
    masks = [mask for _, mask, _, _ in struct.iter_unpack("iIII", os.read(watch, 4096))]
    counted.append(masks.count(IN_CLOSE_NOWRITE))
    os.close(watch)


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_pipes_are_left_to_torch(content: bytes | None, tmp_path: Path) -> None:
    """Check that a pipe is opened once: another opening would take bytes away from torch."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if content is None:
        torch.save(STATE, tmp_path / "model.pt")
        content = (tmp_path / "model.pt").read_bytes()

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), path.open("wb") as pipe:
            pipe.write(content)

    def through_pipe(load: Callable[..., Any]) -> Any:
        result: list[Any] = []
        writer = threading.Thread(target=feed)
        reader = threading.Thread(target=lambda: result.append(attempt_only(load, path)))
        with counting_readers(path) as count:
            writer.start()
            reader.start()
            reader.join(20)
            if reader.is_alive():
                feed()
                raise AssertionError("the pipe was opened twice")
        writer.join()
        return result[0], count[0]

    expected = through_pipe(torch.load)
    assert expected[0] is not None
    assert expected[1] == 1
    assert through_pipe(ioshape.load) == expected


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_devices_are_read_as_by_torch(device: str) -> None:
    assert attempt_only(ioshape.load, Path(device)) == attempt_only(torch.load, Path(device))


# ---- Files that cannot be read -------------------------------------------------------------------


def raised_by(call: Callable[[], Any]) -> ioshape.StorageError:
    with pytest.raises(ioshape.StorageError) as raised:
        call()
    return raised.value


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[Path]:
    """Yield a file that this process has no permission to read."""
    path = tmp_path / "secret.pt"
    torch.save(STATE, path)
    path.chmod(0)
    user = os.geteuid()
    if user != 0:
        yield path
        return
    folders = [folder for folder in path.parents if folder.stat().st_mode & 0o001 == 0]
    modes = {folder: folder.stat().st_mode for folder in folders}
    for folder in folders:
        folder.chmod(0o711)
    os.seteuid(65534)
    yield path
    os.seteuid(user)
    for folder, mode in modes.items():
        folder.chmod(mode)


def assert_says_what_torch_says(path: Path | str) -> None:
    """Check that the OSError has the fields of torch's error. It is also a RuntimeError."""
    with pytest.raises(OSError) as expected:  # noqa: PT011
        torch.load(path)
    error = raised_by(lambda: ioshape.load(path))
    assert (error.errno, error.strerror) == (expected.value.errno, expected.value.strerror)
    assert isinstance(error, type(expected.value))
    assert isinstance(error, RuntimeError)
    assert (error.filename, error.operation) == (str(path), "load")


@pytest.mark.parametrize("name", ["missing.pt", ".", "ours.pt/below", "x" * 300, "loop", ""])
def test_where_no_file_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ours.pt").touch()
    Path("loop").symlink_to("loop")
    assert_says_what_torch_says(name)


def test_files_of_somebody_else(unreadable: Path) -> None:
    assert_says_what_torch_says(unreadable)


def test_names_that_no_file_can_have() -> None:
    with pytest.raises(ValueError, match="null"):
        ioshape.load("a\0b")


def test_errors_survive_pickling(tmp_path: Path, ours: Path) -> None:
    flip(ours, offset_of(ours, "data/0") + 5)
    errors = [
        raised_by(lambda: ioshape.load(tmp_path / "missing.pt")),
        raised_by(lambda: ioshape.load(tmp_path)),
        raised_by(lambda: ioshape.load(ours)),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        for name in ("errno", "strerror", "filename", "code", "operation", "remedy"):
            assert getattr(copy, name) == getattr(error, name), name


LARGE = {"weights": [zoo.filled(torch.float32, 500_000), zoo.filled(torch.float64, 7)], "n": 1}


# ---- Sharing, threads and garbage collection -----------------------------------------------------


def test_what_was_shared_is_shared(tmp_path: Path) -> None:
    for save, load in ((ioshape.save, torch.load), (torch.save, ioshape.load)):
        save(zoo.build("views_of_one_storage"), tmp_path / "model.pt")
        loaded = load(tmp_path / "model.pt")
        loaded["base"][24] = 1000
        assert loaded["transposed"][4, 2] == 1000
        assert loaded["block"][0, 0] == 1000
        loaded["overlapping"][0, 1] = -1
        assert loaded["base"][5] == -1
        assert loaded["base"] is loaded["again"]


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("write", [torch.save, ioshape.save])
def test_the_same_is_loaded_wherever_the_call_is(
    write: Callable[..., Any], surroundings: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    write({**LARGE, "module": torch.nn.Linear(3, 4)}, path)
    with SURROUNDINGS[surroundings]():
        expected = attempt(lambda: torch.load(path, weights_only=False), path)
        assert attempt(lambda: ioshape.load(path, weights_only=False), path) == expected
    assert expected.error is None


def test_each_load_has_memory_of_its_own(ours: Path) -> None:
    first, second = ioshape.load(ours), ioshape.load(ours)
    first["weight"].zero_()
    assert_same(second, STATE)
    ours.unlink()
    assert_same(second, STATE)


def test_many_threads_load_at_once(tmp_path: Path) -> None:
    ioshape.save(LARGE, tmp_path / "ours.pt")
    torch.save(LARGE, tmp_path / "theirs.pt")
    paths = [tmp_path / "ours.pt", tmp_path / "theirs.pt"] * 8
    with ThreadPoolExecutor(8) as pool:
        descriptions = list(pool.map(lambda path: describe(ioshape.load(path)), paths))
    assert all(description == describe(LARGE) for description in descriptions)


class Curious:
    """An object that records the garbage collector's threshold during the load, also in a child."""

    def __init__(self, does: str = "nothing") -> None:
        self.does = does
        self.rested = self.rested_in_child = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rested = rests()
        child = os.fork()
        if not child:
            os._exit(rests())
        self.rested_in_child = bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        match state["does"]:
            case "fail":
                raise KeyError("enough")
            case "disable":  # as another thread of the program may do
                gc.disable()
            case "set":
                gc.set_threshold(5000)


def rests() -> bool:
    return gc.get_threshold()[0] > 10**9


@pytest.mark.parametrize("does", ["nothing", "fail", "disable", "set"])
def test_the_garbage_collector_rests_while_objects_are_made(tmp_path: Path, does: str) -> None:
    """Check the threshold during the load, and that changes by the program stay."""
    path = tmp_path / "a.pt"
    usual = gc.get_threshold()
    ioshape.save({"curious": Curious(does), "large": torch.zeros(300_000)}, path)
    try:
        if does == "fail":
            with pytest.raises(KeyError, match="enough"):
                ioshape.load(path, weights_only=False)
        else:
            found = ioshape.load(path, weights_only=False)["curious"]
            assert (found.rested, found.rested_in_child) == (True, False)
        assert gc.isenabled() == (does != "disable")
        assert gc.get_threshold()[0] == (5000 if does == "set" else usual[0])
    finally:
        gc.enable()
        gc.set_threshold(*usual)


def test_a_file_that_is_replaced_meanwhile_is_read_to_its_end(tmp_path: Path) -> None:
    """Check that a load gets the old file or the new one, never a mixture."""
    path = tmp_path / "model.pt"
    old, new = torch.zeros(3_000_000), torch.ones(3_000_000)
    ioshape.save([old, old + 0], path)
    replaced: list[bool] = []

    def replace(_progress: ioshape.types.Progress) -> None:
        if not replaced:
            replaced.append(True)
            ioshape.save([new, new + 0], path)

    assert_same(ioshape.load(path, progress=replace), [old, old + 0])
    assert_same(ioshape.load(path), [new, new + 0])


@pytest.mark.slow
def test_large_tensors_come_in_one_call_and_tiny_ones_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watched(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            calls.append(name)
            original(*arguments)

        return call

    for name in ("read_records", "read_file"):
        monkeypatch.setattr(Reader, name, watched(name, getattr(Reader, name)))
    large = [torch.randn(1 << 18) for _ in range(8)]
    tiny = [torch.full((4,), float(i)) for i in range(4000)]
    for state, name in ((large, "read_records"), (tiny, "read_file")):
        torch.save(state, tmp_path / "model.pt")
        calls.clear()
        assert_same(ioshape.load(tmp_path / "model.pt"), state)
        assert 0 < calls.count(name) < len(state) / 4


def test_progress_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(LARGE, path)
    told: list[ioshape.types.Progress] = []
    ioshape.load(path, progress=told.append)
    assert {progress.phase for progress in told} <= {"read", "done"}
    assert all(progress.done_bytes <= progress.total_bytes for progress in told)
    assert told[-1].total_bytes == path.stat().st_size
