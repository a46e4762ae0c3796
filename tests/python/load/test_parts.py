# SPDX-License-Identifier: Apache-2.0
"""Parts of a file: ioshape.load(path, only=...) and ioshape.open(path)[name][index]."""

import argparse
import collections
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import ioshape
import numpy
import pytest
import torch
from ioshape.safetensors import save_file
from records import flip, offset_of

MIB = 1 << 20

WRITERS: list[Callable[..., Any]] = [torch.save, ioshape.save]
both_writers = pytest.mark.parametrize("write", WRITERS, ids=["torch", "ours"])


def read_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- open(path)[name] ----------------------------------------------------------------------------

TENSORS = {
    "rows": torch.randn(40, 7, 3),
    "turned": torch.randn(9, 11).t(),
    "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": torch.arange(100)[::3],
    "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 4),
    "late": torch.arange(50, dtype=torch.int16)[20:],
    "unsigned": torch.arange(50, dtype=torch.int32).to(torch.uint16)[7:],
    "half": torch.randn(30).to(torch.bfloat16),
    "flags": torch.rand(10) > 0.5,
    "complex": torch.randn(6, 2, dtype=torch.complex128),
    "float8": torch.randn(16).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 5),
}

INDICES = [
    ...,
    (),
    slice(None),
    slice(3, 9),
    slice(9, 3),
    slice(-2, None),
    slice(0, None, 2),
    0,
    -1,
    numpy.int64(1),
    None,
    (0, 1),
    (slice(None), slice(1, 3)),
    (slice(None), 0),
    (..., slice(0, 2)),
    (slice(1, 2), None, 1),
    [0, 1],
    (slice(None), [1, 0]),
    torch.tensor([1, 0]),
]


def outcome(tensor: Any, index: Any) -> Any:
    """Return the result of an index, or the class of its error."""
    try:
        return tensor[index]
    except (IndexError, ValueError) as error:
        return type(error)


def content(tensor: torch.Tensor) -> list[int]:
    plain = tensor.clone(memory_format=torch.contiguous_format).flatten()
    return plain.view(torch.uint8).tolist() if plain.numel() else []


@both_writers
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_means_what_it_means_of_the_tensor(
    write: Callable[..., Any], index: Any, tmp_path: Path
) -> None:
    path = tmp_path / "file.pt"
    write({"some": [TENSORS]}, path)
    with ioshape.open(path) as file:
        assert file.keys() == [f"some[0].{name}" for name in TENSORS]
        for name, tensor in TENSORS.items():
            stored = file[f"some[0].{name}"]
            assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
            part, wanted = outcome(stored, index), outcome(tensor, index)
            if isinstance(wanted, type):
                assert part is wanted, name
                continue
            assert (part.dtype, part.shape) == (wanted.dtype, wanted.shape), name
            assert content(part) == content(wanted), name


def test_safetensors_files_are_read_in_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensor = torch.randn(10, 7, 3)
    save_file({"small": torch.ones(3), "a": tensor}, path, checksums=True)
    with ioshape.open(path) as file:
        assert sorted(file.keys()) == ["a", "small"]
        assert file.read(8) == path.read_bytes()[:8]
        assert torch.equal(file["a"][2:5, 1], tensor[2:5, 1])
        assert file["a"].verified == "blocks"
        assert file.read(2) == path.read_bytes()[8:10]


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Check that at most 1.2 times the requested bytes are read, and one block more."""
    path = tmp_path / "file.pt"
    tensor = torch.randn(64 * MIB // 4).view(1024, -1)
    ioshape.save({"before": torch.zeros(MIB), "tensor": tensor, "after": torch.ones(MIB)}, path)
    evict(path)
    before = read_bytes()
    with ioshape.open(path) as file:
        rows = file["tensor"][100:164]
        assert torch.equal(rows, tensor[100:164])
    read = read_bytes() - before
    if not read:
        pytest.skip("what is read from this filesystem is not counted")
    # The headers and the pickle are some KiB, read as pages.
    assert read <= 1.2 * rows.nbytes + MIB + (256 << 10)


def test_parts_far_apart_are_read_without_what_lies_between(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tensor = torch.randn(4, 4, MIB)  # rows of 4 MiB
    ioshape.save({"experts": tensor}, path)
    evict(path)
    before = read_bytes()
    with ioshape.open(path) as file:
        one = file["experts"][:, 1]
        assert torch.equal(one, tensor[:, 1])
    assert read_bytes() - before <= 1.2 * one.nbytes + MIB + (256 << 10)
    with ioshape.open(path) as file:
        assert torch.equal(file["experts"][:, :, 5:900_000:7], tensor[:, :, 5:900_000:7])
        assert torch.equal(file["experts"][1:3, ::2, ::300], tensor[1:3, ::2, ::300])


def test_damage_is_found_in_the_block_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tensor = torch.arange(4 * MIB, dtype=torch.int32)  # sixteen blocks
    ioshape.save({"model": {"weight": tensor}}, path)
    flip(path, offset_of(path, "data/0") + 5 * MIB + 17)
    with ioshape.open(path) as file:
        weight = file["model.weight"]
        assert weight.verified == "blocks"
        assert torch.equal(weight[: MIB // 2], tensor[: MIB // 2])
        # The wrong byte is in this block, but not in the requested elements.
        with pytest.raises(ioshape.DamagedError, match="data/0"):
            weight[5 * MIB // 4 : 5 * MIB // 4 + 2]
        assert torch.equal(weight[6 * MIB // 4 :], tensor[6 * MIB // 4 :])


def test_files_of_torch_are_verified_where_all_of_a_storage_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    tensor = torch.arange(MIB, dtype=torch.int32)
    torch.save({"weight": tensor}, path)
    flip(path, offset_of(path, "data/0") + MIB)
    with ioshape.open(path) as file:
        assert file["weight"].verified == "whole"
        assert torch.equal(file["weight"][:1000], tensor[:1000])
        with pytest.raises(ioshape.DamagedError):
            file["weight"][...]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "run"),))

    torch.save({"weight": torch.arange(5), "bomb": Bomb()}, path)
    with ioshape.open(path) as file:
        assert file["weight"][1:3].tolist() == [1, 2]
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        ioshape.load(path, only=["weight"])
    assert not (tmp_path / "run").exists()


def test_names_and_shapes_are_told_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.zeros(5, 7)}, path)
    program = (
        "import ioshape, sys\n"
        "with ioshape.open(sys.argv[1]) as file:\n"
        "    print(file.keys(), file['weight'].shape, 'torch' in sys.modules)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "['weight'] (5, 7) False"


def test_what_needs_torch_says_so_where_there_is_none() -> None:
    program = "import sys; sys.modules['torch'] = None; import ioshape; ioshape.save"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "torch is not installed; install it: pip install torch" in done.stderr
    assert "During handling" not in done.stderr


def test_what_has_no_parts_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    twice = {1: torch.zeros(2), "a": torch.zeros(2), "a.b": torch.ones(1), "storage": None}
    twice["storage"] = torch.ones(3).untyped_storage()  # type: ignore[assignment]
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    torch.save({**twice, "nest": {"b": torch.ones(1)}, "conjugate": conjugate}, path)
    with ioshape.open(path) as file:
        assert "a" in file
        assert "b" not in file
        with pytest.raises(KeyError):
            file["b"]
        with pytest.raises(ValueError, match=r"'storage'.*load"):
            file["storage"]
        with pytest.raises(ValueError, match=r"'conjugate'.*load"):
            file["conjugate"]
        assert "StoredTensor" in repr(file["a"])
        assert len(file["a"]) == 2
    torch.save({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}, path)
    with ioshape.open(path) as file, pytest.raises(ValueError, match="another tensor"):
        file["a.b"]
    path.write_bytes(b"text")
    with ioshape.open(path) as file:
        with pytest.raises(ioshape.errors.FormatError, match="neither"):
            file.keys()
        assert file.read() == b"text"


def test_a_closed_file_gives_nothing_more(tmp_path: Path) -> None:
    torch.save({"rows": torch.arange(100_000)}, tmp_path / "model.pt")
    with ioshape.open(tmp_path / "model.pt") as file:
        rows = file["rows"]
        assert rows[7] == 7
    again = ioshape.open(tmp_path / "model.pt")
    again.close()
    for use in (lambda: rows[8], lambda: rows[...], lambda: file["rows"][9], again.keys):
        with pytest.raises(ValueError, match=r"model\.pt.* closed"):
            use()


# ---- load(only=) ---------------------------------------------------------------------------------


def checkpoint() -> dict[str, Any]:
    torch.manual_seed(1)
    first, tied = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    tied.weight = first.weight
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(200), tied)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "history": [{"loss": torch.tensor(1.0), "step": 1}, {"loss": torch.tensor(2.0), "step": 2}],
        "large": torch.randn(500_000),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@both_writers
def test_what_is_asked_for_is_as_if_all_were_loaded(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "file.pt"
    whole = checkpoint()
    write(whole, path)
    whole = torch.load(path)
    assert same(ioshape.load(path, only=["*"]), whole)
    part = ioshape.load(path, only=["model.*", "epoch"])
    assert same(part, {"model": whole["model"], "epoch": 3})
    assert part["model"]._metadata == whole["model"]._metadata
    assert part["model"]["0.weight"].data_ptr() == part["model"]["2.weight"].data_ptr()
    assert same(ioshape.load(path, only=("optimizer",)), {"optimizer": whole["optimizer"]})
    state = ioshape.load(path, only=["optimizer.state[0].*"])
    assert same(state, {"optimizer": {"state": {0: whole["optimizer"]["state"][0]}}})
    losses = ioshape.load(path, only=["history[1].*"])
    assert same(losses, {"history": [whole["history"][1]]})


@both_writers
def test_the_rest_is_not_read(write: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    write({"a": torch.ones(MIB), "b": torch.ones(MIB), "c": torch.ones(MIB)}, path)
    flip(path, offset_of(path, "data/0") + 100)
    flip(path, offset_of(path, "data/2") + 100)
    assert torch.equal(ioshape.load(path, only=["b"])["b"], torch.ones(MIB))
    with pytest.raises(ioshape.DamagedError, match="'c'"):
        ioshape.load(path, only=["b", "c"])
    assert ioshape.load(path, only=["c"], verify=False)["c"].shape == (MIB,)


def test_plain_values_are_loaded_with_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    whole = {
        "model": {"weight": torch.randn(50_000)},
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "bytes": b"\xff\0",
        "left out": torch.randn(50_000),
    }
    torch.save(whole, path)
    flip(path, offset_of(path, "data/1") + 100)  # it is not read
    part = ioshape.load(path, only=["model.*", "set", "dtype", "bytes"])
    assert same(part, {key: whole[key] for key in ("model", "set", "dtype", "bytes")})


def test_a_class_that_is_not_plain_is_loaded_by_the_rules_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    arguments = argparse.Namespace(lr=0.1, tensors=[torch.ones(3)])
    whole = {
        "model": {"weight": torch.randn(50_000)},
        "arguments": arguments,
        "counts": collections.Counter("aab"),
    }
    torch.save(whole, path)
    for name in ("model.*", "arguments"):
        with pytest.raises(Exception, match="Namespace"):
            ioshape.load(path, only=[name], weights_only=True)
    assert same(ioshape.load(path, only=["model.*"], weights_only=False), {"model": whole["model"]})
    loaded = ioshape.load(path, only=["arguments"], weights_only=False)
    assert loaded["arguments"].lr == 0.1
    assert list(loaded) == ["arguments"]


@pytest.mark.parametrize("where", ["meta", torch.device("meta"), {"cpu": "meta"}], ids=str)
@pytest.mark.parametrize("how", [{}, {"only": ["a", "b"]}], ids=["all", "only"])
def test_a_tensor_under_two_names_is_one_without_memory(
    how: dict[str, Any], where: Any, tmp_path: Path
) -> None:
    tensor = torch.ones(90_000)
    ioshape.save({"a": tensor, "b": tensor, "c": torch.ones(90_000)}, tmp_path / "model.pt")
    found = ioshape.load(tmp_path / "model.pt", map_location=where, **how)
    assert found["a"] is found["b"]
    assert found["a"].is_meta


def test_it_goes_where_map_location_says(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(50_000), "b": torch.ones(50_000)}, path)
    asked: list[str] = []

    def place(storage: Any, tag: str) -> Any:
        asked.append(tag)
        assert storage.nbytes() == 200_000
        return storage.clone()

    for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, place):
        assert torch.equal(ioshape.load(path, location, only=["a"])["a"], torch.ones(50_000))
    assert asked == ["cpu"]


@pytest.mark.parametrize("how", ["legacy", "mapped", "file object", "safetensors"])
def test_what_torch_reads_is_left_out_of_as_well(how: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.safetensors" if how == "safetensors" else "a.pt")
    whole = {"a": torch.ones(3), "b": torch.zeros(3)}
    if how == "safetensors":
        save_file(whole, path)
    else:
        torch.save(whole, path, _use_new_zipfile_serialization=how != "legacy")
    if how == "file object":
        with path.open("rb") as file:
            part = ioshape.load(file, only=["b"])
    else:
        part = ioshape.load(path, only=["b"], mmap=how == "mapped" or None)
    assert same(part, {"b": whole["b"]})


def test_names_that_nothing_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(3)}, path)
    for names in (["b"], ["a.*"], []):
        with pytest.raises(ValueError, match="nothing in it"):
            ioshape.load(path, only=names)
    with pytest.raises(TypeError, match="list"):
        ioshape.load(path, only="a")
    with pytest.raises(ValueError, match="not both"):
        ioshape.load(path, only=["a"], into={"a": torch.ones(3)})
    cyclic: dict[str, Any] = {"a": torch.ones(3)}
    cyclic["self"] = cyclic
    torch.save(cyclic, path)
    assert list(ioshape.load(path, only=["a"])) == ["a"]


def test_a_part_of_a_file_changes_nothing_that_the_file_names(tmp_path: Path) -> None:
    before = torch._utils._rebuild_tensor_v2.__defaults__
    state = b"N}" + b"\x8c\x0c__defaults__" + b")s\x86b"
    pickled = hostile.named("torch._utils", "_rebuild_tensor_v2") + state
    path = tmp_path / "a.pt"
    path.write_bytes(hostile.with_pickle(pickled))
    with pytest.raises(Exception, match=r"."):
        ioshape.load(path, only=["a"])
    assert torch._utils._rebuild_tensor_v2.__defaults__ == before
