# SPDX-License-Identifier: Apache-2.0
"""The pickle that the library writes, read by torch: every dtype, layout and way of loading."""

import io
import pickletools
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from capi import DTYPES, SaveError, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config
from tree import program

# Torch warns about complex32.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Tensors = dict[str, torch.Tensor]

LOADERS: dict[str, Callable[[Path], Tensors]] = {
    "weights_only": lambda path: torch.load(path, weights_only=True),
    "plain": lambda path: torch.load(path, weights_only=False),
    "mmap": lambda path: torch.load(path, mmap=True, weights_only=True),
    "stream": lambda path: torch.load(io.BytesIO(path.read_bytes()), weights_only=True),
}


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits: NaNs with payloads, signed zeros, subnormals."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order, for dtypes without arithmetic in torch, too."""
    size = tensor.dtype.itemsize
    bytes_of_elements = bytes_of(tensor.untyped_storage()).as_strided(
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
        tensor.storage_offset() * size,
    )
    return bytes(bytes_of_elements.contiguous().numpy().tobytes())


def assert_same(loaded: torch.Tensor, saved: torch.Tensor) -> None:
    assert type(loaded) is torch.Tensor
    assert loaded.dtype == saved.dtype
    assert loaded.shape == saved.shape
    assert not loaded.requires_grad
    assert loaded.storage_offset() == 0
    assert loaded.untyped_storage().nbytes() == saved.numel() * saved.dtype.itemsize
    assert bits_of(loaded) == bits_of(saved)


def assert_all_same(loaded: Tensors, saved: Mapping[str, torch.Tensor]) -> None:
    assert type(loaded) is dict
    assert list(loaded) == list(saved)
    for name, tensor in saved.items():
        assert_same(loaded[name], tensor)


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[[Path], Tensors]:
    return LOADERS[request.param]


def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, load: Callable[[Path], Tensors]) -> None:
    tensors = {
        f"{dtype} {shape}": filled(dtype, *shape)
        for dtype in DTYPES
        for shape in [(), (1,), (5,), (3, 4), (0,), (3, 0, 4), (2, 1, 3), (2, 3, 4, 5), (70000,)]
    }
    save(tmp_path / "all.pt", tensors)
    assert_all_same(load(tmp_path / "all.pt"), tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_alone_is_like_the_file_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"t": filled(dtype, 3, 5).t()}
    save(tmp_path / "ours.pt", tensors)
    torch.save(tensors, tmp_path / "torch.pt")
    ours = torch.load(tmp_path / "ours.pt")
    theirs = torch.load(tmp_path / "torch.pt")
    assert_same(ours["t"], theirs["t"])
    assert ours["t"].stride() == theirs["t"].stride()
    assert globals_in(tmp_path / "ours.pt") == globals_in(tmp_path / "torch.pt")


def opcodes_in(path: Path) -> list[tuple[str, str]]:
    """Return the opcodes of the pickle, with their arguments."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        data = archive.read(name)
    return [(opcode.name, str(argument)) for opcode, argument, _ in pickletools.genops(data)]


def globals_in(path: Path) -> set[str]:
    return {argument for opcode, argument in opcodes_in(path) if opcode == "GLOBAL"}


def test_each_global_is_named_once_and_a_thousand_items_are_set_at_a_time(tmp_path: Path) -> None:
    """Check that neither look-ups nor the unpickler's stack grow with the number of tensors."""
    save(tmp_path / "many.pt", {str(i): filled(list(DTYPES)[i % 22], 2) for i in range(2001)})
    opcodes = opcodes_in(tmp_path / "many.pt")
    named = [argument for opcode, argument in opcodes if opcode == "GLOBAL"]
    assert len(named) == len(set(named))
    assert [opcode for opcode, _ in opcodes].count("SETITEMS") == 3


def test_nothing_in_the_pickle_is_unsafe(tmp_path: Path) -> None:
    save(tmp_path / "all.pt", {str(dtype): filled(dtype, 2) for dtype in DTYPES})
    assert torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "all.pt") == []


def dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def test_dense_tensors_keep_their_strides(tmp_path: Path) -> None:
    tensors = {
        "transposed": filled(torch.float32, 4, 6).t(),
        "permuted": filled(torch.int16, 2, 3, 4, 5).permute(2, 0, 3, 1),
        "channels_last": filled(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one image": filled(torch.float32, 1, 3, 4, 5).to(memory_format=torch.channels_last),
        "one channel": filled(torch.float32, 2, 1, 4, 5).to(memory_format=torch.channels_last),
        "offset": filled(torch.float32, 10, 3)[4:7],
        "offset, transposed": filled(torch.float64, 10, 3)[4:7].t(),
        "empty": torch.empty(0, 3),
        "empty, transposed": torch.empty(0, 3).t(),
        "empty, many": torch.empty(3, 0, 4, 0, 5),
        "scalar": torch.tensor(3.5),
        **{f"{n} rows": torch.empty(n, 0) for n in (255, 256, 65535, 65536, 2**31, 2**59)},
    }
    assert all(dense(tensor) or not tensor.numel() for tensor in tensors.values())
    save(tmp_path / "dense.pt", tensors)
    loaded = torch.load(tmp_path / "dense.pt")
    assert_all_same(loaded, tensors)
    for name, tensor in tensors.items():
        assert loaded[name].stride() == tensor.stride(), name
    assert loaded["one image"].is_contiguous(memory_format=torch.channels_last)


def test_tensors_with_gaps_or_overlaps_are_refused(tmp_path: Path) -> None:
    base = filled(torch.float32, 8, 9, 10)
    tensors = {
        "expanded": filled(torch.float32, 1, 4).expand(5, 4),
        "expanded scalar": torch.tensor(7).expand(3, 3),
        "columns": base[:, 2:5, :],
        "every second": base[::2, ::3, ::2],
        "sliced, permuted": base[1:7, :, 3:].permute(2, 0, 1),
        "windows": filled(torch.int16, 20).unfold(0, 5, 2),
        "diagonal": filled(torch.complex128, 6, 6).diagonal(),
        "bytes": filled(torch.uint8, 100)[::7],
        "large": filled(torch.bfloat16, 2000, 1001)[:, :1000],
    }
    assert not any(dense(tensor) for tensor in tensors.values())
    for name, tensor in tensors.items():
        with pytest.raises(SaveError, match=f'tensor "{name}" .*save a contiguous copy'):
            save(tmp_path / "file.pt", {name: tensor})
    assert not list(tmp_path.iterdir())


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Generate a tensor as programs make them: sliced, permuted, expanded, unsqueezed."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    tensor = filled(dtype, *shape)
    for _ in range(draw(st.integers(0, 3))):
        dims = tensor.dim()
        step = draw(st.sampled_from(["slice", "permute", "expand", "add"]))
        if step == "slice" and dims:
            dim = draw(st.integers(0, dims - 1))
            begin, every = draw(st.integers(0, 5)), draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * dim + (slice(begin, None, every),)]
        elif step == "permute":
            tensor = tensor.permute(draw(st.permutations(range(dims))))
        elif step == "expand":
            tensor = tensor.expand(draw(st.integers(0, 3)), *tensor.shape)
        else:
            tensor = tensor.unsqueeze(draw(st.integers(0, dims)))
    return tensor


@pytest.mark.slow
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(views(), max_size=6))
def test_any_view_comes_back(tmp_path: Path, tensors: list[torch.Tensor]) -> None:
    named = {
        f"tensor {i}": tensor if dense(tensor) else tensor.contiguous()
        for i, tensor in enumerate(tensors)
    }
    save(tmp_path / "views.pt", named)
    loaded = torch.load(tmp_path / "views.pt")
    assert_all_same(loaded, named)
    for name, tensor in named.items():
        if tensor.numel():
            wanted = tensor.stride()
            long = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
            assert [loaded[name].stride(dim) for dim in long] == [wanted[dim] for dim in long]


def test_sixty_four_dimensions_load(tmp_path: Path) -> None:
    tensors = {"deep": filled(torch.int32, *([1] * 30 + [2] + [1] * 32 + [3]))}
    save(tmp_path / "deep.pt", tensors)
    loaded = torch.load(tmp_path / "deep.pt")["deep"]
    assert loaded.stride() == tensors["deep"].stride()
    assert torch.equal(loaded, tensors["deep"])


def test_any_name_loads(tmp_path: Path, load: Callable[[Path], Tensors]) -> None:
    names = [
        "layers.0.weight",
        "ä",
        "重み",
        "🐍",
        "a b\n\tc\\'\"",
        "/",
        "../x",
        "n" * 4096,
        "ö" * 2048,
        "0",
    ]
    tensors = {name: filled(torch.int64, i) for i, name in enumerate(names)}
    save(tmp_path / "names.pt", tensors)
    assert_all_same(load(tmp_path / "names.pt"), tensors)


def test_a_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"tensor \"nnn.*longer than 4096"):
        save(tmp_path / "names.pt", {"n" * 4097: torch.zeros(1)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 5000])
@pytest.mark.slow
def test_any_number_of_tensors_loads_in_order(
    tmp_path: Path, load: Callable[[Path], Tensors], count: int
) -> None:
    tensors = {f"layers.{count - i}.bias": torch.tensor(i) for i in range(count)}
    save(tmp_path / "many.pt", tensors)
    loaded = load(tmp_path / "many.pt")
    assert list(loaded) == list(tensors)
    assert all(int(value) == i for i, value in enumerate(loaded.values()))


def test_loaded_tensors_have_nothing_in_common(tmp_path: Path) -> None:
    save(tmp_path / "two.pt", {"a": torch.zeros(4, requires_grad=True), "b": torch.zeros(4)})
    loaded = torch.load(tmp_path / "two.pt")
    loaded["a"].fill_(1)
    loaded["a"].requires_grad_().register_hook(lambda grad: grad)
    assert loaded["b"].tolist() == [0, 0, 0, 0]
    assert not loaded["b"]._backward_hooks


def test_a_module_takes_the_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save(tmp_path / "model.pt", model.state_dict())
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def sample(path: Path) -> Tensors:
    """Save tensors as small and large records and an empty one, and return them."""
    tensors = {
        "large": filled(torch.float32, 1000, 1000),
        "empty": torch.empty(0),
        "small": filled(torch.uint16, 7),
        "transposed": filled(torch.float64, 300, 400).t(),
    }
    save(path, tensors)
    return tensors


def test_zip_tools_find_nothing_wrong(tmp_path: Path) -> None:
    sample(tmp_path / "sample.pt")
    with zipfile.ZipFile(tmp_path / "sample.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0].endswith("/data.pkl")
    subprocess.run([program("unzip"), "-qt", tmp_path / "sample.pt"], check=True)


def test_meta_and_fake_loads_find_the_storages(tmp_path: Path) -> None:
    tensors = sample(tmp_path / "sample.pt")
    content = (tmp_path / "sample.pt").read_bytes()
    on_meta = torch.load(tmp_path / "sample.pt", map_location="meta")
    with FakeTensorMode():
        fake = torch.load(tmp_path / "sample.pt")
    for name, tensor in tensors.items():
        for loaded in (on_meta[name], fake[name]):
            assert loaded.shape == tensor.shape
            assert loaded.stride() == tensor.stride()
            assert loaded.dtype == tensor.dtype
            begin = loaded.untyped_storage()._checkpoint_offset
            bits = bytes_of(tensor.untyped_storage()).numpy().tobytes()
            assert content[begin : begin + len(bits)] == bits


def test_torch_may_calculate_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = sample(tmp_path / "sample.pt")
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with config.patch("load.calculate_storage_offsets", True):  # type: ignore[attr-defined]
        for load_it in LOADERS.values():
            assert_all_same(load_it(tmp_path / "sample.pt"), tensors)


@pytest.mark.long
def test_a_hundred_thousand_tensors_load(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.full((3,), i) for i in range(100000)}
    save(tmp_path / "many.pt", tensors)
    assert_all_same(torch.load(tmp_path / "many.pt"), tensors)
