# SPDX-License-Identifier: Apache-2.0
"""Any graph of objects that hypothesis draws is the same after a round trip, in each direction."""

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import numpy as np
import pytest
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same import assert_same, assert_same_description, describe
from stock import stock

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e5m2,
    torch.uint16,
)

# hypothesis draws plain values. "ref" refers to an earlier or unfinished container or tensor, and
# "view" is a part of a storage of the graph.
Spec = Any

storages = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.sampled_from([1, 2, 3, 17, 64, 1000, 70_000])),
    min_size=2,
    max_size=5,
)

views = st.tuples(
    st.just("view"),
    st.integers(0, 9),  # index of the storage
    st.integers(0, 100),  # first element
    st.integers(0, 200),  # number of elements
    st.integers(1, 3),  # stride
    st.sampled_from(["plain", "parameter", "square", "expanded", "scalar"]),
)

leaves = st.one_of(
    views,
    st.tuples(st.just("ref"), st.integers(0, 30)),
    st.tuples(
        st.just("plain"),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.complex_numbers(),
            st.text(),
            st.binary(max_size=300),
        ),
    ),
    st.tuples(
        st.just("array"),
        st.sampled_from(["f4", "i8", "u1", "?", "c8", "U3", "S2", "M8[s]"]),
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from("CF"),
    ),
)

keys = st.one_of(st.text(max_size=10), st.integers(), st.none(), st.tuples(st.integers()))


def containers(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    return st.one_of(
        st.tuples(st.sampled_from(["list", "tuple", "object"]), st.lists(inner, max_size=5)),
        st.tuples(
            st.just("dict"), st.lists(st.tuples(keys, inner), max_size=5, unique_by=lambda p: p[0])
        ),
        st.tuples(st.just("set"), st.frozensets(keys, max_size=4)),
    )


# Each graph has some views to which its other parts can refer.
graphs = st.tuples(
    storages,
    st.lists(views, min_size=2, max_size=6),
    st.recursive(leaves, containers, max_leaves=25),
)


class _Build:
    """A builder of a graph from drawn values."""

    def __init__(self, drawn: Any) -> None:
        self.storages = [zoo.filled(dtype, n_elements) for dtype, n_elements in drawn]
        self.made: list[Any] = []

    def _view(self, which: int, begin: int, count: int, step: int, kind: str) -> Any:
        whole = self.storages[which % len(self.storages)]
        part = whole[begin % (len(whole) + 1) :][: count * step : step]
        if kind == "parameter":
            return torch.nn.Parameter(part, requires_grad=False)
        if kind == "square":
            side = int(len(part) ** 0.5)
            return part[: side * side].reshape(side, side).t() if step == 1 else part
        if kind == "expanded":
            return part[:1].expand(3, len(part[:1]))
        if kind == "scalar":
            return whole[begin % len(whole)]
        return part

    def _remember(self, value: Any) -> Any:
        self.made.append(value)
        return value

    def _container(self, kind: str, members: Any) -> Any:
        # Register the container before it has members, so that they can refer to it.
        if kind == "object":
            made = self._remember(zoo.Config("drawn"))
            made.sizes = [self(member) for member in members]
        elif kind == "dict":
            made = self._remember({})
            made.update((key, self(member)) for key, member in members)
        elif kind == "list":
            made = self._remember([])
            made.extend(self(member) for member in members)
        else:
            made = tuple([self(member) for member in members])
        return made

    def __call__(self, spec: Spec) -> Any:
        kind, *rest = spec
        if kind == "view":
            made = self._remember(self._view(*rest))
        elif kind == "ref":
            made = self.made[rest[0] % len(self.made)] if self.made else None
        elif kind == "plain":
            made = rest[0]
        elif kind == "set":
            made = self._remember(set(rest[0]))
        elif kind == "array":
            dtype, shape, order = rest
            numbers = np.arange(int(np.prod(shape, dtype=int))).astype("i8")
            made = numbers.astype(dtype).reshape(shape, order=order)
        else:
            made = self._container(kind, rest[0])
        return made


def build(graph: Any) -> Any:
    drawn, first, rest = graph
    return _Build(drawn)(("list", [*first, rest]))


def load_whole(load: Callable[..., Any], path: Path) -> Any:
    return load(path, weights_only=False)


def assert_round_trips(value: Any, folder: Path) -> None:
    before = describe(value)
    ours, background, theirs = (folder / f"{name}.pt" for name in ("ours", "background", "theirs"))
    # Each save replaces the file of the previous example.
    handle = ioshape.save_async(value, background)
    ioshape.save(value, ours, durable=False)
    torch.save(value, theirs)
    handle.wait()
    assert background.read_bytes() == ours.read_bytes()
    assert describe(value) == before
    expected = stock().load(theirs)
    assert expected.error is None, expected.error
    found = stock().load(ours)
    assert found.error is None, found.error
    assert_same_description(found.description, expected.description)
    assert_same_description(describe(load_whole(ioshape.load, theirs)), expected.description)
    loaded = load_whole(ioshape.load, ours)
    assert_same_description(describe(loaded), expected.description)
    assert_same(loaded, load_whole(torch.load, theirs))
    ioshape.verify(ours)
    # torch.load may separate storages without bytes. In that case only stock torch decides.
    if all(storage.nbytes() for storage in _storages(value)):
        assert_same(loaded, value)


def _storages(value: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors that pickling visits."""
    found: list[torch.UntypedStorage] = []

    def note(storage: Any) -> None:
        found.append(storage)

    registry: Any = torch.serialization._package_registry
    entry = (-5, note, lambda _storage, _location: None)
    registry.insert(0, entry)
    try:
        torch.save(value, io.BytesIO())
    finally:
        registry.remove(entry)
    return found


@pytest.mark.slow
@given(graph=graphs)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_graphs_round_trip(graph: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_round_trips(build(graph), Path(folder))


@pytest.mark.long
@given(graph=graphs)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_graphs_round_trip(graph: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_round_trips(build(graph), Path(folder))
