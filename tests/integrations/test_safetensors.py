# SPDX-License-Identifier: Apache-2.0
"""Test ioshape.safetensors, and the package safetensors when it writes through ioshape."""

import errno
import io
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import ioshape
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from checkpoints import left_clean
from ioshape._load import reader
from ioshape.safetensors import (
    load_file,
    load_model,
    safe_open,
    save_file,
    save_file_async,
    save_model,
)
from processes import TIMEOUT_S

COMMAND = [sys.executable, "-m", "ioshape", "run"]


class Originals:
    """The original functions. Global variables would be replaced by patch()."""

    serialize_file: Any = staticmethod(safetensors.serialize_file)


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield
    assert safetensors.torch.serialize_file is Originals.serialize_file  # type: ignore[attr-defined]
    assert safetensors.numpy.serialize_file is Originals.serialize_file  # type: ignore[attr-defined]


@pytest.fixture
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that gets a line for each save."""
    folder = tmp_path_factory.mktemp("trace")
    ioshape.configure(trace=folder)
    return folder


def saves_in(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def state() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(300, 1000),
        "bias": torch.arange(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
    }


# ---- Functions of ioshape.safetensors -----------------------------------------------------------


def test_a_file_is_durable_whole_and_the_originals(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = state()
    report = save_file(tensors, path, {"format": "pt"})
    assert path.read_bytes() == safetensors.torch.save(tensors, {"format": "pt"})
    assert report.path == str(path)
    assert report.file_bytes == path.stat().st_size
    assert not report.downgrades
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_mode_is_that_of_any_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_file(state(), tmp_path / "model.safetensors")
        safetensors.torch.save_file(state(), tmp_path / "original.safetensors")
    finally:
        os.umask(before)
    mode = (tmp_path / "model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == 0o640


def test_what_the_original_refuses_is_refused_in_its_words(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = torch.zeros(4, 4)
    wrong: list[Any] = [
        {"a": whole, "b": whole},
        {"a": whole.t()[:2]},
        {"a": whole.to_sparse()},
        {"a": 1.0},
        [whole],
    ]
    for tensors in wrong:
        with pytest.raises((RuntimeError, ValueError)) as original:
            safetensors.torch.save_file(tensors, path)
        with pytest.raises(type(original.value)) as ours:
            save_file(tensors, path)
        # Names that share memory are listed in any order.
        assert sorted(str(ours.value)) == sorted(str(original.value))
        assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        save_file(state(), path, replace=False)
    assert path.read_bytes() == before
    with pytest.raises(ioshape.StorageError) as failed:
        save_file(state(), tmp_path / "missing" / "model.safetensors")
    assert failed.value.filename == str(tmp_path / "missing" / "model.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_in_the_background_tensors_may_change_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = state()
    expected = safetensors.torch.save(tensors)
    handle = save_file_async(tensors, path)
    tensors["weight"].zero_()
    assert handle.result().file_bytes == len(expected)
    assert path.read_bytes() == expected


def test_a_model_that_shares_tensors_is_saved_once(tmp_path: Path) -> None:
    def tied() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
        model[1].weight = model[0].weight
        return model

    model = tied()
    report = save_model(model, tmp_path / "ours")
    safetensors.torch.save_model(model, str(tmp_path / "original"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "original").read_bytes()
    assert report.file_bytes == (tmp_path / "ours").stat().st_size
    other = tied()
    missing, unexpected = safetensors.torch.load_model(other, tmp_path / "ours")
    assert not missing
    assert not unexpected
    assert torch.equal(other[0].weight, model[0].weight)


# ---- Functions of the patched package -----------------------------------------------------------


def test_the_package_writes_through_us(tmp_path: Path, traced: Path) -> None:
    tensors = state()
    arrays = {"a": np.arange(12.0).reshape(3, 4), "b": np.array(True)}
    with ioshape.patched(safetensors=True):
        safetensors.torch.save_file(tensors, tmp_path / "a", {"format": "pt"})
        safetensors.numpy.save_file(arrays, str(tmp_path / "b"), {})
    assert [Path(save["path"]).name for save in saves_in(traced)] == ["a", "b"]
    assert (tmp_path / "a").read_bytes() == safetensors.torch.save(tensors, {"format": "pt"})
    assert (tmp_path / "b").read_bytes() == safetensors.numpy.save(arrays, {})
    safetensors.torch.save_file(tensors, tmp_path / "c")
    assert len(saves_in(traced)) == 2


def test_patches_count(tmp_path: Path, traced: Path) -> None:
    with ioshape.patched(safetensors=True):
        with ioshape.patched(safetensors=True):
            pass
        with ioshape.patched():
            safetensors.torch.save_file(state(), tmp_path / "a")
    assert len(saves_in(traced)) == 1


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000], ids=["empty", "NUL", "long"])
def test_what_c_has_no_name_for_is_left_to_the_original(
    name: str, tmp_path: Path, traced: Path
) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {name: torch.arange(4)}
    report = save_file(tensors, path)
    assert report.written_by == "safetensors"
    assert [step.code for step in report.downgrades] == ["safetensors"]
    assert path.read_bytes() == safetensors.torch.save(tensors)
    assert [save["written_by"] for save in saves_in(traced)] == ["safetensors"]
    with pytest.raises(ValueError, match="background"):
        save_file_async(tensors, path)


def test_what_is_no_tensor_the_original_refuses(tmp_path: Path) -> None:
    tensor = torch.zeros(4)
    wrong = safetensors.TensorSpec(
        dtype="float32", shape=[5], data_ptr=tensor.data_ptr(), data_len=16
    )
    with ioshape.patched(safetensors=True):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.serialize_file({"a": wrong}, str(tmp_path / "a"))
        with pytest.raises(TypeError):
            safetensors.serialize_file(["a"], str(tmp_path / "a"))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_versions_before_0_8_hand_over_is_saved(tmp_path: Path) -> None:
    data = torch.arange(6, dtype=torch.float32).numpy().tobytes()
    given: Any = {"a": {"dtype": "float32", "shape": [2, 3], "data": data}}
    with ioshape.patched(safetensors=True):
        safetensors.serialize_file(given, tmp_path / "a", metadata={"x": "y"})
    tensors = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    assert (tmp_path / "a").read_bytes() == safetensors.torch.save(tensors, {"x": "y"})


def test_a_sharded_model_of_the_hub_is_saved_by_us(tmp_path: Path, traced: Path) -> None:
    tensors = {f"layer.{i}": torch.randn(100, 100) for i in range(6)}
    with ioshape.patched(safetensors=True):
        huggingface_hub.save_torch_state_dict(tensors, tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) == 3
    assert {Path(save["path"]).name for save in saves_in(traced)} == shards
    for name, value in tensors.items():
        loaded = safetensors.torch.load_file(tmp_path / index["weight_map"][name])
        assert torch.equal(loaded[name], value)


def test_a_model_of_accelerate_is_saved_by_us(tmp_path: Path, traced: Path) -> None:
    model = torch.nn.Linear(30, 40)
    with ioshape.patched(safetensors=True):
        accelerate: Any = import_module("accelerate")
        accelerate.Accelerator(cpu=True).save_model(model, str(tmp_path))
    assert [Path(save["path"]).name for save in saves_in(traced)] == ["model.safetensors"]
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["weight"], model.weight)


# ---- Loading ------------------------------------------------------------------------------------

DTYPES = [
    dtype
    for dtype in safetensors.torch._SIZE
    if dtype is not None and dtype is not torch.float4_e2m1fn_x2
]


def of_all_dtypes() -> dict[str, torch.Tensor]:
    tensors = {}
    for dtype in DTYPES:
        size = torch.empty(0, dtype=dtype).element_size()
        data = torch.randint(0, 2, (24 * size,)).to(torch.uint8)
        tensors[str(dtype)] = data.view(dtype).reshape(2, 3, 4).clone()
    return {**tensors, "scalar": torch.tensor(7), "empty": torch.empty(3, 0, 2)}


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert loaded[name].shape == value.shape, name
        assert (
            loaded[name].view(torch.uint8).equal(value.view(torch.uint8))
            if value.dim()
            else (loaded[name].equal(value))
        ), name


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
def test_what_is_loaded_is_what_was_saved(checksums: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {**of_all_dtypes(), "large": torch.randn(700_000)}
    save_file(tensors, path, {"a": "b"}, checksums=checksums)
    assert_same(load_file(path), tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b"}
        assert file.keys() == sorted(tensors)
        with safetensors.safe_open(path, "pt") as original:
            assert file.offset_keys() == original.offset_keys()
        assert_same({name: file.get_tensor(name) for name in reversed(file.keys())}, tensors)
        assert_same(file.get_tensors(), tensors)
        with pytest.raises(safetensors.SafetensorError):
            file.get_tensor("none")


def test_many_tensors_are_read_with_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load some tensors into existing ones, and the others into new memory."""
    path = tmp_path / "model.safetensors"
    tensors = {f"{number:02}": torch.randn(90_000 + number) for number in range(20)}
    save_file(tensors, path, checksums=True)
    calls: list[int] = []
    read_records = reader.Reader.read_records

    def counted(self: reader.Reader, requests: list[reader.Request]) -> None:
        calls.append(len(requests))
        read_records(self, requests)

    monkeypatch.setattr(reader.Reader, "read_records", counted)
    into = {"03": torch.zeros(90_003), "04": torch.zeros(2 * 90_004)[::2]}
    loaded = load_file(path, into=into)
    assert_same({name: one.contiguous() for name, one in loaded.items()}, tensors)
    assert all(loaded[name] is into[name] for name in into)
    assert calls == [20]


def test_a_tensor_may_look_like_an_archive(tmp_path: Path) -> None:
    """Load a tensor that ends like a torch zip.

    The zip's records are none of the file's tensors.
    """
    path, room = tmp_path / "model.safetensors", 300
    archive = b""
    # the header has the archive's length, and the archive has offsets that include the header
    for _ in range(2):
        entries = {
            "first": {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]},
            "empty": {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]},
            "zip": {
                "dtype": "U8",
                "shape": [len(archive)],
                "data_offsets": [40, 40 + len(archive)],
            },
        }
        head = room.to_bytes(8, "little") + json.dumps(entries).encode().ljust(room) + b"x" * 40
        whole = io.BytesIO(head)
        with zipfile.ZipFile(whole, "a") as file:
            file.writestr("archive/data.pkl", bytes(range(256)))
        archive = whole.getvalue()[len(head) :]
    path.write_bytes(head + archive)
    with reader.Reader(str(path), any_format=True) as opened:
        assert opened.is_torch_zip
    loaded = load_file(path)
    assert bytes(loaded["first"].tolist()) == b"x" * 40
    assert bytes(loaded["zip"].tolist()) == archive
    assert loaded["empty"].shape == (0,)


def test_files_of_the_original_are_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = of_all_dtypes()
    safetensors.torch.save_file(tensors, path)
    assert_same(load_file(path), tensors)
    model, other = torch.nn.Linear(4, 5), torch.nn.Linear(4, 5)
    safetensors.torch.save_model(model, str(path))
    missing, unexpected = load_model(other, path)
    assert not missing
    assert not unexpected
    assert torch.equal(model.weight, other.weight)


def test_checksums_tell_every_change(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(600_000), "b": torch.arange(300_000.0)}
    report = save_file(tensors, path, checksums=True)
    assert not report.downgrades
    assert path.read_bytes() == safetensors.torch.save(tensors)
    times = path.stat()
    for offset in (3, 100, 2_000_000, path.stat().st_size - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 4]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises((ioshape.DamagedError, ioshape.errors.FormatError)):
            load_file(path)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([byte]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert_same(load_file(path), tensors)


def test_tensors_that_are_there_are_read_into(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.randn(30, 40), "b": torch.randn(40, 30), "c": torch.arange(5)}
    save_file(tensors, path)
    model = torch.nn.Linear(40, 30, bias=False)
    turned = torch.zeros(30, 40).t()
    loaded = load_file(path, into={"a": model.weight, "b": turned})
    assert loaded["a"] is model.weight
    assert loaded["b"] is turned
    assert torch.equal(model.weight, tensors["a"])
    assert torch.equal(turned, tensors["b"])
    assert torch.equal(loaded["c"], tensors["c"])
    with pytest.raises(ValueError, match="'a'"):
        load_file(path, into={"a": torch.zeros(40, 30)})
    with pytest.raises(ValueError, match="'d'"):
        load_file(path, into={"d": torch.zeros(40, 30)})


@pytest.mark.parametrize(
    "index",
    [
        slice(2, 5),
        slice(None),
        slice(-3, None),
        slice(5, 2),
        (slice(None), slice(1, 3)),
        (slice(1, 9, 2), slice(None, None, 3)),
        3,
        -1,
        (4, slice(2)),
        (slice(1, 3), 0, 1),
        ...,
        (..., 1),
    ],
    ids=str,
)
def test_slices_are_those_of_the_tensor(index: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = torch.randn(10, 7, 3)
    save_file({"small": torch.ones(3), "a": whole}, path)
    with safe_open(path) as file:
        part = file.get_slice("a")
        assert part.get_shape() == [10, 7, 3]
        assert part.get_dtype() == "F32"
        assert torch.equal(part[index], whole[index])


def wrong_files() -> dict[str, bytes]:
    def file(header: object, data: bytes = b"") -> bytes:
        text = header if isinstance(header, str) else json.dumps(header)
        return len(text).to_bytes(8, "little") + text.encode() + data

    good = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    return {
        "empty": b"",
        "short": b"\x10\0\0\0\0\0\0\0{}",
        "long header": (1 << 40).to_bytes(8, "little") + b"{}",
        "no JSON": file("{" + "x" * 20),
        "deep": file('{"a":' * 50000),
        "twice": file('{"a":' + json.dumps(good) + ',"a":' + json.dumps(good) + "}", b"1234"),
        "a list": file("[]      "),
        "gap": file({"a": {**good, "data_offsets": [1, 5]}}, b"12345"),
        "more data": file({"a": good}, b"12345"),
        "less data": file({"a": good}, b"123"),
        "shape": file({"a": {**good, "shape": [5]}}, b"1234"),
        "negative": file({"a": {**good, "shape": [-2, -2]}}, b"1234"),
        "overflow": file({"a": {**good, "shape": [1 << 62, 1 << 62]}}, b"1234"),
        "bool": file({"a": {**good, "shape": [True, 4]}}, b"1234"),
        "dtype": file({"a": {**good, "dtype": "U7"}}, b"1234"),
        "member": file({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
        "none": file({"a": None}, b""),
        "metadata": file({"__metadata__": {"a": 1}, "b": good}, b"1234"),
        "overlap": file({"a": good, "b": {**good, "data_offsets": [2, 6]}}, b"123456"),
    }


@pytest.mark.parametrize("name", wrong_files())
def test_a_file_that_does_not_fit_together_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(wrong_files()[name])
    with pytest.raises((ioshape.DamagedError, ioshape.errors.FormatError)) as refused:
        load_file(path)
    assert refused.value.filename == str(path)
    if name == "twice":
        return  # the original takes the last one
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(path)


# ---- inspect and verify --------------------------------------------------------------------------


def test_inspect_tells_where_each_tensor_lies(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = of_all_dtypes()
    safetensors.torch.save_file(tensors, path)
    found = ioshape.inspect(path)
    data = path.read_bytes()
    assert {tensor.name for tensor in found.tensors} == set(tensors)
    for tensor in found.tensors:
        value = tensors[tensor.name]
        assert f"torch.{tensor.dtype}" == str(value.dtype)
        assert (tensor.shape, tensor.stride) == (tuple(value.shape), value.stride())
        at = found.records[0].file_offset + tensor.storage_offset
        raw = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[at : at + len(raw)] == raw


def test_verify_compares_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(600_000), "b": torch.ones(600_000)}, path)
    ioshape.verify(path, quick=True)
    with pytest.raises(ioshape.StorageError) as none:
        ioshape.verify(path)
    assert none.value.errno == errno.ENODATA
    save_file({"a": torch.ones(600_000), "b": torch.ones(600_000)}, path, checksums=True)
    ioshape.verify(path)
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ioshape.DamagedError) as damaged:
        ioshape.verify(path)
    assert "'b'" in str(damaged.value)
    assert "'a'" not in str(damaged.value)
    with path.open("r+b") as file:
        file.truncate(times.st_size - 1)
    with pytest.raises(ioshape.DamagedError):
        ioshape.verify(path, quick=True)


def test_the_commands_know_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 4)}, path, checksums=True)
    for command, said in (("inspect", "weight"), ("verify", "ok")):
        done = subprocess.run(
            [sys.executable, "-m", "ioshape", command, path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


# ---- Under "ioshape run" ------------------------------------------------------------------------


def run(text: str, folder: Path) -> str:
    (folder / "script.py").write_text(text)
    variables = {**os.environ, "IOSHAPE_TRACE": str(folder / "trace")}
    done = subprocess.run(
        [*COMMAND, "script.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("order", ["torch, safetensors.torch", "safetensors.torch, torch"])
def test_a_script_saves_through_us(order: str, tmp_path: Path) -> None:
    text = f"""
import {order}
from safetensors.torch import save_file

save_file({{"a": torch.arange(5)}}, "model.safetensors")
torch.save([1], "model.pt")
"""
    run(text, tmp_path)
    names = [Path(save["path"]).name for save in saves_in(tmp_path / "trace")]
    assert names == ["model.safetensors", "model.pt"]
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["a"], torch.arange(5))


@pytest.mark.slow
def test_a_script_without_torch_stays_without(tmp_path: Path) -> None:
    text = """
import sys
import numpy
import safetensors.numpy

print("_native" in repr(list(sys.modules)))
safetensors.numpy.save_file({"a": numpy.arange(5)}, "model.safetensors")
print("torch" in sys.modules)
"""
    assert run(text, tmp_path).split() == ["False", "False"]
    assert len(saves_in(tmp_path / "trace")) == 1


def test_without_the_package_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import ioshape.safetensors"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install" in done.stderr
