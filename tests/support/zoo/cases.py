# SPDX-License-Identifier: Apache-2.0
"""The list of all objects of the zoo, and what builds them."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Without types, in torch.
untyped: Any = torch


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of object."""

    build: Callable[[], Any]
    #: it comes back as it was, in every detail that same.describe() sees
    exact: bool = True
    #: torch.save refuses it
    refused: bool = False
    #: it can be built from storages with anything in them
    any_data: bool = True


CASES: dict[str, Case] = {}

_Build = Callable[[], Any]


def case(
    *, exact: bool = True, refused: bool = False, any_data: bool = True
) -> Callable[[_Build], _Build]:
    """Registers the function that builds a case."""

    def register(build: _Build) -> _Build:
        CASES[build.__name__] = Case(build, exact and not refused, refused, any_data)
        return build

    return register


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(name: str) -> Any:
    """A new one, the same every time."""
    torch.manual_seed(1)
    torch.utils.hooks.RemovableHandle.next_id = 0  # of hooks, which are pickled with their numbers
    with _quiet():
        return CASES[name].build()


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are 1, 2, 3 and so on."""
    count = 1
    for size in shape:
        count *= size
    n_bytes = count * dtype.itemsize
    if dtype is torch.bool:
        return (torch.arange(n_bytes) % 3 == 0).reshape(shape)
    content = torch.arange(1, 252, dtype=torch.uint8).repeat(n_bytes // 251 + 1)[:n_bytes].clone()
    made: Any = torch.empty(0, dtype=dtype)
    # Also strides: the dtypes of quantized tensors have nobody to compute them.
    strides = torch.empty(shape, device="meta").stride()
    made.set_(content.untyped_storage(), 0, shape, strides)
    return made  # type: ignore[no-any-return]
