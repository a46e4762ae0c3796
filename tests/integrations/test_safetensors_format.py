# SPDX-License-Identifier: Apache-2.0
"""Test that files from C and Python equal those of the original library, byte by byte."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import safetensors.torch
import torch
from capi import DTYPES, SaveError, Way, save_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from ioshape.safetensors import save_file, save_file_async
from safetensors import safe_open

NOT_IN_THE_FORMAT = {torch.complex32, torch.complex128}


def knows(dtype: torch.dtype) -> bool:
    """Return whether the installed version of the original supports the dtype."""
    try:
        safetensors.torch.save({"a": torch.zeros(16, dtype=torch.uint8).view(dtype)})
    except KeyError:
        return False
    return True


COMMON = [dtype for dtype in DTYPES if knows(dtype)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes. A bool must be 0 or 1."""
    size = torch.empty(0, dtype=dtype).element_size()
    n_bytes = size * torch.Size(shape).numel()
    made = torch.randint(0, 256, (n_bytes,), generator=torch.Generator().manual_seed(seed))
    values = made.to(torch.uint8)
    if dtype is torch.bool:
        values %= 2
    return values.view(dtype).reshape(shape) if n_bytes else torch.empty(shape, dtype=dtype)


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
# C strings can hold neither an empty name nor NUL here.
NAMES = st.text(
    st.characters(min_codepoint=1, exclude_categories=["Cs"]), min_size=1, max_size=12
).filter(lambda name: name != "__metadata__")


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    made = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=12)):
        dtype = draw(st.sampled_from(COMMON))
        shape = draw(SHAPES)
        if dtype is torch.float4_e2m1fn_x2 and not shape:
            shape = (1,)
        made[name] = tensor_of(dtype, shape, draw(st.integers(0, 1000)))
    return made


# With several entries the order in the original's files changes from run to run.
METADATA = st.none() | st.dictionaries(NAMES, st.text(st.characters(min_codepoint=1,
    exclude_categories=["Cs"])), max_size=1)  # fmt: skip


def ours(tensors: dict[str, torch.Tensor], metadata: Any = None, way: Way = Way.BLOCKING) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_safetensors(path, tensors, metadata, way)
        return path.read_bytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(tensors(), METADATA, st.sampled_from(Way))
def test_files_are_those_of_the_original(
    state: dict[str, torch.Tensor], metadata: dict[str, str] | None, way: Way
) -> None:
    if not state and metadata is not None:
        return  # see test_metadata_alone_is_json
    assert ours(state, metadata, way) == safetensors.torch.save(state, metadata)


def test_every_dtype_has_its_place() -> None:
    """Sort names in the order opposite to dtypes, and then in their order."""
    for names in range(len(COMMON)), range(len(COMMON), 0, -1):
        pairs = zip(names, COMMON, strict=True)
        state = {f"{name:02}": tensor_of(dtype, (4,), name) for name, dtype in pairs}
        assert ours(state) == safetensors.torch.save(state)


@settings(deadline=None, max_examples=100)
@given(tensors(), METADATA, st.booleans())
def test_python_writes_the_same(
    state: dict[str, torch.Tensor], metadata: dict[str, str] | None, background: bool
) -> None:
    if not state and metadata is not None:
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        if background:
            save_file_async(state, path, metadata).wait()
        else:
            save_file(state, path, metadata, durable=False)
        assert path.read_bytes() == safetensors.torch.save(state, metadata)


def test_metadata_alone_is_json(tmp_path: Path) -> None:
    # The original (0.8.0) writes one brace too many for empty metadata without tensors.
    path = tmp_path / "empty.safetensors"
    save_safetensors(path, {}, {})
    data = path.read_bytes()
    assert json.loads(data[8:]) == {"__metadata__": {}}
    assert int.from_bytes(data[:8], "little") == len(data) - 8
    with safe_open(path, "pt") as file:
        assert file.metadata() == {}


def test_metadata_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    metadata = {f"{i * 7 % 10}": "x" for i in range(10)}
    save_safetensors(path, {"a": torch.ones(3)}, metadata)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"].items()) == list(metadata.items())


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([dtype for dtype in COMMON if dtype is not torch.float4_e2m1fn_x2]),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(Way),
)
def test_tensors_that_are_not_contiguous_are_refused(
    dtype: torch.dtype, shape: list[int], random: Any, way: Way
) -> None:
    """Refuse dense tensors in another element order, too. Our zip would keep that order."""
    dims = list(range(len(shape)))
    random.shuffle(dims)
    whole = tensor_of(dtype, tuple(shape), 5).permute(dims)
    steps = tuple(slice(random.randrange(2), None, random.randrange(1, 3)) for _ in dims)
    views = [whole, whole[steps], whole[:1].expand(3, *whole.shape[1:])]
    for view in views:
        if view.is_contiguous():
            assert ours({"x": view}, None, way) == safetensors.torch.save({"x": view.clone()})
        else:
            with pytest.raises(SaveError, match="save a contiguous copy"):
                ours({"x": view}, None, way)


@pytest.mark.parametrize("dtype", sorted(NOT_IN_THE_FORMAT, key=str), ids=str)
def test_what_the_format_has_no_name_for_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=str(dtype).removeprefix("torch.")):
        save_safetensors(tmp_path / "a", {"x": torch.zeros(2, dtype=dtype)})
    assert not list(tmp_path.iterdir())


def test_what_readers_would_mistake_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(SaveError, match="__metadata__"):
        save_safetensors(path, {"__metadata__": torch.zeros(2)})
    with pytest.raises(SaveError, match="step"):
        save_safetensors(path, {}, {}, step=1)
    scalar = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(())
    with pytest.raises(SaveError, match="dimension"):
        save_safetensors(path, {"x": scalar})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_names_that_take_more_than_readers_accept_are_refused(tmp_path: Path) -> None:
    # Each name is six times as long in JSON.
    state = {"\x01" * 4000 + str(i): torch.zeros(0) for i in range(4200)}
    with pytest.raises(SaveError, match="fewer"):
        save_safetensors(tmp_path / "a", state)
    assert not list(tmp_path.iterdir())
