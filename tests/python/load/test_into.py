# SPDX-License-Identifier: Apache-2.0
"""ioshape.load(into=...) fills existing tensors with what torch.load would return."""

import collections
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import ioshape._load.reader
import pytest
import torch
import zoo
from records import flip, offset_of

WRITERS: list[Callable[..., Any]] = [torch.save, ioshape.save]
both_writers = pytest.mark.parametrize("write", WRITERS, ids=["torch", "ours"])

# Elements of a tensor that is large enough to be read only when its destination is known.
LARGE = 20_000


def make(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 300)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 300)).square().sum().backward()
    optimizer.step()


def content(tensor: torch.Tensor) -> Any:
    is_strange = tensor.is_quantized or tensor.is_nested or tensor.is_meta
    if is_strange or tensor.layout != torch.strided:
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def leaves(value: Any) -> dict[str, Any]:
    """Return the leaves of nested containers by their positions, plain tensors as bytes."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        value = value.state_dict()
    if isinstance(value, dict):
        return {f".{k}{at}": leaf for k, v in value.items() for at, leaf in leaves(v).items()}
    if isinstance(value, (list, tuple)):
        return {f"[{i}]{at}": leaf for i, v in enumerate(value) for at, leaf in leaves(v).items()}
    return {"": content(value) if type(value) in (torch.Tensor, torch.nn.Parameter) else value}


def addresses(model: torch.nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in model.state_dict().values()]


# ---- Filled tensors ------------------------------------------------------------------------------


@both_writers
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_training_goes_on(write: Callable[..., Any], has_stepped: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    model, optimizer = make()
    train(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state = {name: part.state_dict() for name, part in saved.items()}
    state["schedule"] = schedule.state_dict()
    write({**state, "epoch": 3, "random": torch.get_rng_state()}, path)

    other, other_optimizer = make(seed=1)
    if has_stepped:
        train(other, other_optimizer)
    other_schedule = torch.optim.lr_scheduler.StepLR(other_optimizer, 7)
    into: dict[str, Any] = {"model": other, "optimizer": other_optimizer}
    before = addresses(other)
    found = ioshape.load(
        path, into={**into, "schedule": other_schedule, "random": torch.get_rng_state(), "epoch": 0}
    )
    assert found["model"] is other
    assert found["optimizer"] is other_optimizer
    assert found["epoch"] == 3
    assert addresses(other) == before
    assert leaves(into) == leaves(saved)
    assert other_schedule.state_dict() == schedule.state_dict()
    for one, another in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(5)
        train(one, another)
    assert leaves(other) == leaves(model)


def blank(value: Any) -> Any:
    """Return the same containers with uninitialised plain tensors."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        is_plain = not (value.is_quantized or value.is_nested or value.is_meta)
        is_plain &= value.layout == torch.strided
        return torch.empty_like(value) if is_plain else None
    if type(value) in (dict, collections.OrderedDict):
        return {key: blank(one) for key, one in value.items()}
    return [blank(one) for one in value] if type(value) in (list, tuple) else None


# No caller fills a container that contains itself.
CASES = [name for name, case in zoo.CASES.items() if not case.refused and name != "recursive"]


@pytest.mark.parametrize("name", CASES)
def test_whatever_torch_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "zoo.pt"
    torch.save({"it": zoo.build(name)}, path)
    expected = torch.load(path, weights_only=False)
    found = ioshape.load(path, into=blank(expected), weights_only=False, strict=False)
    expected_leaves = leaves(expected)
    for at, leaf in leaves(found).items():
        if isinstance(leaf, (int, float, str, bytes)):
            assert repr(leaf) == repr(expected_leaves[at]), at


@both_writers
def test_layouts(write: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "layouts.pt"
    base = torch.randn(400, 300)
    tied = torch.randn(LARGE)
    state = {
        "plain": torch.randn(200, 300),
        "transposed": torch.randn(200, 300).t(),
        "into transposed": torch.randn(300, 200),
        "last": torch.randn(4, 5, 60, 70).to(memory_format=torch.channels_last),
        "rows": base[:200],
        "columns": base[:, 100:],
        "tied": tied,
        "with": tied,
        "conjugate": torch.randn(LARGE, dtype=torch.complex64).conj(),
        "expanded": torch.randn(LARGE, 1).expand(LARGE, 3),
        "small": torch.arange(3),
        "number": torch.tensor(7.0, dtype=torch.bfloat16),
        "none": torch.empty(0, 5),
        "parameter": torch.nn.Parameter(torch.randn(LARGE)),
    }
    write(state, path)
    state["conjugate"] = state["conjugate"].clone()
    into = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    into["transposed"] = torch.zeros(200, 300).t()
    into["into transposed"] = torch.zeros(200, 300).t()
    into["parameter"] = torch.nn.Parameter(torch.zeros(LARGE))
    gaps = torch.zeros(200, 600)
    into["plain"] = gaps[:, ::2]
    found = ioshape.load(path, into=into)
    assert all(found[name] is into[name] for name in state)
    assert leaves(found) == leaves(state)
    assert not gaps[:, 1::2].any()


@both_writers
def test_a_tensor_by_itself(write: Callable[..., Any], tmp_path: Path) -> None:
    write(torch.arange(LARGE), tmp_path / "x.pt")
    into = torch.zeros(LARGE, dtype=torch.int64)
    assert ioshape.load(tmp_path / "x.pt", into=into) is into
    assert torch.equal(into, torch.arange(LARGE))


@both_writers
def test_tied_tensors_of_which_one_goes_to_the_caller(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    tied = torch.randn(LARGE)
    write({"a": tied, "b": tied}, tmp_path / "x.pt")
    into = torch.zeros(LARGE)
    found = ioshape.load(tmp_path / "x.pt", into={"a": into}, strict=False)
    assert torch.equal(into, tied)
    assert torch.equal(found["b"], tied)


def sum_of(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


class Summed:
    """The result of a function that reads a tensor's bytes during unpickling."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return sum_of, (self.tensor,)


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("is_allowed", [False, True])
def test_whoever_looks_at_bytes_while_they_are_unpickled_sees_them(
    is_allowed: bool, tmp_path: Path
) -> None:
    tensor = torch.ones(LARGE)
    torch.save({"sum": Summed(tensor), "tensor": tensor}, tmp_path / "x.pt")
    into = torch.zeros(LARGE)
    if is_allowed:
        with torch.serialization.safe_globals([sum_of]):
            found = ioshape.load(tmp_path / "x.pt", into={"tensor": into, "sum": 0.0})
    else:
        found = ioshape.load(tmp_path / "x.pt", into={"tensor": into}, weights_only=False)
    assert found["sum"] == LARGE
    assert torch.equal(into, tensor)


def test_an_object_keeps_its_tensors(tmp_path: Path) -> None:
    tensor = torch.ones(LARGE)
    marked: Any = torch.zeros(3)
    marked.tensor = tensor
    counted = collections.Counter({"x": tensor})
    for holder in (Holder(tensor), counted, marked):
        torch.save({"held": holder, "tensor": tensor}, tmp_path / "x.pt")
        into = torch.zeros(LARGE)
        with torch.serialization.safe_globals([Holder]):
            found = ioshape.load(tmp_path / "x.pt", into={"tensor": into}, strict=False)
        held = found["held"]
        assert torch.equal(held["x"] if isinstance(held, dict) else held.tensor, tensor)
        assert torch.equal(into, tensor)


def test_other_byte_order(tmp_path: Path) -> None:
    torch.save(torch.arange(LARGE), tmp_path / "here.pt")
    path = tmp_path / "elsewhere.pt"
    with zipfile.ZipFile(tmp_path / "here.pt") as here, zipfile.ZipFile(path, "w") as elsewhere:
        for name in here.namelist():
            content = here.read(name)
            elsewhere.writestr(name, b"big" if name.endswith("/byteorder") else content)
    expected = torch.load(path)
    into = torch.zeros(LARGE, dtype=torch.int64)
    ioshape.load(path, into=into)
    assert expected[1] == 1 << 56
    assert torch.equal(into, expected)


@pytest.mark.parametrize("how", ["old", "compressed", "file"])
def test_what_torch_alone_reads(how: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(LARGE)}, path, _use_new_zipfile_serialization=how != "old")
    if how == "compressed":
        unpack = "import zipfile, sys; z = zipfile.ZipFile(sys.argv[1])\n"
        unpack += "with zipfile.ZipFile(sys.argv[2], 'w', zipfile.ZIP_DEFLATED) as out:\n"
        unpack += "    for n in z.namelist(): out.writestr(n, z.read(n))"
        subprocess.run([sys.executable, "-c", unpack, path, tmp_path / "y.pt"], check=True)
        path = tmp_path / "y.pt"
    into = {"a": torch.zeros(LARGE, dtype=torch.int64)}
    if how == "file":
        with path.open("rb") as file:
            ioshape.load(file, into=into)
    else:
        ioshape.load(path, into=into)
    assert torch.equal(into["a"], torch.arange(LARGE))


class Own(torch.nn.Module):
    """A module that has extra state and returns copies of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LARGE))
        self.inner = torch.nn.Linear(3, 4)
        self.steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        state = super().state_dict(*arguments, **named)
        state["weight"] = state["weight"].clone()
        return state


def test_a_module_with_its_own_mind(tmp_path: Path) -> None:
    one, other = Own(), Own()
    one.steps = 5
    torch.nn.init.normal_(one.weight)
    ioshape.save(one.state_dict(), tmp_path / "x.pt")
    assert ioshape.load(tmp_path / "x.pt", into=other) is other
    assert other.steps == 5
    assert leaves(other) == leaves(one)


def test_autograd_notices(tmp_path: Path) -> None:
    ioshape.save(torch.ones(LARGE), tmp_path / "x.pt")
    weight = torch.nn.Parameter(torch.zeros(LARGE))
    loss: Any = weight.square().sum()
    ioshape.load(tmp_path / "x.pt", into=weight)
    assert weight.requires_grad
    with pytest.raises(RuntimeError):
        loss.backward()


def test_progress(tmp_path: Path) -> None:
    ioshape.save(torch.ones(1 << 20), tmp_path / "x.pt")
    heard: list[ioshape.types.Progress] = []
    ioshape.load(tmp_path / "x.pt", into=torch.zeros(1 << 20), progress=heard.append)
    assert heard[-1].done_bytes >= 4 << 20
    assert [one.done_bytes for one in heard] == sorted(one.done_bytes for one in heard)


MEMORY = """
import resource, sys, torch, ioshape
into = {str(i): torch.full((16 << 20,), 1.0) for i in range(4)}
ioshape.load(sys.argv[2], into=torch.zeros(100_000))  # what the library needs by itself
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
ioshape.load(sys.argv[1], into=into)
assert all((tensor == int(name)).all() for name, tensor in into.items())
print((peak() - before) >> 10)
"""


@pytest.mark.slow
def test_it_takes_no_memory_for_what_it_fills(tmp_path: Path) -> None:
    path, small = tmp_path / "x.pt", tmp_path / "small.pt"
    ioshape.save({str(i): torch.full((16 << 20,), float(i)) for i in range(4)}, path)
    ioshape.save(torch.zeros(100_000), small)
    command = [sys.executable, "-c", MEMORY, str(path), str(small)]
    mib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert mib < 128  # of 256 MiB that are loaded


def test_of_a_group(tmp_path: Path) -> None:
    ioshape.save_group({"w": torch.arange(LARGE), "n": 4}, tmp_path, step=1)
    into = torch.zeros(LARGE, dtype=torch.int64)
    assert ioshape.load_group(tmp_path, into={"w": into, "n": 0}) == {"w": into, "n": 4}
    assert torch.equal(into, torch.arange(LARGE))
    into.zero_()
    assert ioshape.load_latest(tmp_path, into={"w": into})["n"] == 4
    assert torch.equal(into, torch.arange(LARGE))


# ---- Mismatches ----------------------------------------------------------------------------------


@both_writers
def test_what_differs_is_told_and_nothing_is_changed(
    write: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.pt"
    write({"a": torch.ones(LARGE), "b": [torch.ones(3), torch.ones(2)], "c": torch.ones(1)}, path)
    into: dict[str, Any] = {
        "a": torch.zeros(LARGE),
        "b": [torch.zeros(4), torch.zeros(2, dtype=torch.int32)],
        "d": torch.zeros(1),
    }
    with pytest.raises(ioshape.errors.MismatchError) as raised:
        ioshape.load(path, into=into)
    error = raised.value
    assert error.path == str(path)
    assert error.missing == ("d",)
    assert error.unexpected == ("c",)
    assert [one.name for one in error.different] == ["b[0]", "b[1]"]
    with pytest.raises(ioshape.errors.MismatchError) as raised:
        ioshape.load(path, into=into, strict=False)
    assert len(raised.value.different) == 2
    assert not into["a"].any()
    into["b"] = [torch.zeros(3), torch.zeros(2)]
    found = ioshape.load(path, into=into, strict=False)
    assert found["c"] == 1
    assert into["a"].all()
    assert into["d"] == 0


def test_an_optimizer_hides_nothing_that_a_module_lacks(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    del state["model"]["2.bias"]
    ioshape.save(state, tmp_path / "x.pt")
    other, fresh = make(seed=1)
    before = leaves(other)
    with pytest.raises(ioshape.errors.MismatchError) as raised:
        ioshape.load(tmp_path / "x.pt", into={"model": other, "optimizer": fresh})
    assert raised.value.missing == ("model.2.bias",)
    assert raised.value.unexpected == ()
    assert leaves(other) == before
    assert not fresh.state


@pytest.mark.parametrize(
    "into",
    [
        [torch.zeros(LARGE)],
        torch.zeros(LARGE),
        {"a": {"b": torch.zeros(LARGE)}},
        {"a": [torch.zeros(LARGE)] * 2},
        {"a": torch.zeros(LARGE, device="meta")},
        {"a": torch.zeros(LARGE).to_sparse()},
        torch.nn.Linear(3, 3),
    ],
)
def test_other_nests(into: Any, tmp_path: Path) -> None:
    ioshape.save({"a": torch.ones(LARGE)}, tmp_path / "x.pt")
    with pytest.raises(ioshape.errors.MismatchError):
        ioshape.load(tmp_path / "x.pt", into=into)


@pytest.mark.wording
def test_the_table(tmp_path: Path) -> None:
    ioshape.save({"a.weight": torch.ones(3, 4), "more": torch.ones(1)}, tmp_path / "x.pt")
    into = {"a.weight": torch.zeros(3, 5, dtype=torch.float16), "other": torch.zeros(1)}
    with pytest.raises(ioshape.errors.MismatchError) as raised:
        ioshape.load(tmp_path / "x.pt", into=into)
    first, *table = str(raised.value).splitlines()
    assert (
        first
        == f'cannot load "{tmp_path}/x.pt" into the given objects; give objects that match the file'
    )
    assert table == [
        "            in the file     wanted",
        "  a.weight  (3, 4) float32  (3, 5) float16",
        "  other     missing         there",
        "  more      there           missing",
    ]


@pytest.mark.parametrize("option", [{"map_location": "cpu"}, {"mmap": True}])
def test_options_that_contradict_it(option: dict[str, Any], tmp_path: Path) -> None:
    ioshape.save(torch.ones(3), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="into"):
        ioshape.load(tmp_path / "x.pt", into=torch.zeros(3), **option)


# ---- Damage --------------------------------------------------------------------------------------


@both_writers
def test_damage_on_the_way(write: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write({str(i): torch.ones(LARGE) for i in range(3)}, path)
    flip(path, offset_of(path, "data/1") + 40_000)
    into = {str(i): torch.zeros(LARGE) for i in range(3)}
    with pytest.raises(ioshape.DamagedError) as raised:
        ioshape.load(path, into=into, verify="first")
    assert raised.value.changed == ()
    assert not any(tensor.any() for tensor in into.values())
    with pytest.raises(ioshape.DamagedError) as raised:
        ioshape.load(path, into=into)
    # All tensors of one read are named together.
    assert raised.value.changed == ("0", "1", "2")
    assert raised.value.record == "data/1"
    ioshape.load(path, into=into, verify=False)
    assert into["2"].all()
