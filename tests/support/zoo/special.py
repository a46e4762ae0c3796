# SPDX-License-Identifier: Apache-2.0
"""Tensors that are more than their elements: parameters, subclasses, fakes."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.cases import case, untyped


def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Double a gradient. A hook that can be pickled."""
    return gradient * 2


@case()
def parameters() -> Any:
    return {
        "trained": nn.Parameter(torch.arange(6.0).reshape(2, 3)),
        "frozen": nn.Parameter(torch.arange(3), requires_grad=False),
        "buffer": nn.Buffer(torch.arange(4.0)),
        "transposed": nn.Parameter(torch.arange(6.0).reshape(2, 3).t()),
        "grad": torch.arange(3.0, requires_grad=True),
    }


@case()
def parameter_with_attributes() -> Any:
    parameter = nn.Parameter(torch.arange(6.0))
    parameter.shard_of = (2, 8)  # type: ignore[attr-defined]
    parameter.sequence_parallel = True  # type: ignore[attr-defined]
    buffer = nn.Buffer(torch.arange(6.0))
    buffer.note = {"a": [1]}  # type: ignore[attr-defined]
    return [parameter, buffer]


@case()
def tensor_with_attributes() -> Any:
    tensor = torch.arange(6.0)
    tensor.note = "kept?"  # type: ignore[attr-defined]
    tensor.other = torch.arange(3)  # type: ignore[attr-defined]
    return tensor


@case(exact=False)
def with_hook() -> Any:
    tensor = untyped.arange(3.0, requires_grad=True)
    tensor.register_hook(on_gradient)
    return tensor


@case()
def with_gradient() -> Any:
    parameter = nn.Parameter(torch.arange(3.0))
    (untyped.mul(parameter, 2)).sum().backward()
    return parameter


@case(exact=False)
def inside_a_graph() -> Any:
    return torch.arange(3.0, requires_grad=True) * 2


@case()
def uninitialised() -> Any:
    return {
        "parameter": nn.UninitializedParameter(),
        "buffer": nn.UninitializedBuffer(requires_grad=False),
        "module": nn.LazyLinear(3),
    }


@case()
def inference_tensor() -> Any:
    with torch.inference_mode():
        return torch.arange(4.0) * 2


@case(refused=True)
def fake() -> Any:
    with FakeTensorMode():
        return {"a": torch.ones(3, 4), "b": nn.Parameter(torch.zeros(2))}


class Loud(torch.Tensor):
    """A subclass that intercepts every call."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        parent: Any = super()
        return parent.__torch_function__(func, kinds, args, kwargs or {})


class Tagged(torch.Tensor):
    """A subclass with an attribute."""

    tag: str

    @staticmethod
    def make(data: torch.Tensor, tag: str) -> "Tagged":
        tagged = data.as_subclass(Tagged)
        tagged.tag = tag
        return tagged


class OwnPickle(torch.Tensor):
    """A subclass that defines how it is pickled."""

    note: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _own_pickle, (self.as_subclass(torch.Tensor), "again")


def _own_pickle(data: torch.Tensor, note: str) -> Any:
    made = data.as_subclass(OwnPickle)
    made.note = note
    return made


class Pair(torch.Tensor):
    """A wrapper of two tensors, with no storage of its own."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> "Pair":
        made: Pair = torch.Tensor._make_wrapper_subclass(
            cls, left.shape, dtype=left.dtype, device=left.device
        )
        made.left, made.right = left, right
        return made

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> Any:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _context: Any, _size: Any, _stride: Any) -> "Pair":
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def part(value: Any, name: str) -> Any:
            return getattr(value, name) if isinstance(value, Pair) else value

        made = [
            func(*(part(arg, name) for arg in args), **(kwargs or {})) for name in ("left", "right")
        ]
        return Pair(*made) if isinstance(made[0], torch.Tensor) else made[0]


@case()
def subclasses() -> Any:
    base = torch.arange(12.0)
    return {
        "loud": base.as_subclass(Loud),
        "loud view": base[3:6].as_subclass(Loud),
        "tagged": Tagged.make(torch.arange(3), "x"),
        "own": _own_pickle(torch.arange(4), "again"),
        "base": base,
    }


@case(exact=False)
def subclass_as_parameter() -> Any:
    return nn.Parameter(torch.arange(4.0).as_subclass(Loud))


@case()
def wrapper_subclass() -> Any:
    shared = torch.arange(10.0)
    return {"pair": Pair(shared[:5], shared[5:]), "shared": shared}


@case()
def wrapper_parameter() -> Any:
    return nn.Parameter(Pair(torch.arange(5.0), torch.arange(5.0)))


@case(any_data=False)
def masked() -> Any:
    return torch.masked.masked_tensor(torch.arange(4.0), torch.tensor([True, False, True, True]))
