# SPDX-License-Identifier: Apache-2.0
"""The list of all objects of the zoo, with the functions that build them."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# torch without type checks.
untyped: Any = torch


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of object."""

    build: Callable[[], Any]
    #: a load returns it unchanged in every detail that same.describe() sees
    exact: bool = True
    #: torch.save refuses it
    refused: bool = False
    #: it can be built from storages with any contents
    any_data: bool = True


CASES: dict[str, Case] = {}

_Build = Callable[[], Any]


def case(
    *, exact: bool = True, refused: bool = False, any_data: bool = True
) -> Callable[[_Build], _Build]:
    """Register the function that builds a case."""

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
    """Build an object, equal every time."""
    torch.manual_seed(1)
    torch.utils.hooks.RemovableHandle.next_id = 0  # hooks are pickled with their numbers
    with _quiet():
        return CASES[name].build()


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor whose bytes are 1, 2, 3 and so on."""
    count = 1
    for size in shape:
        count *= size
    n_bytes = count * dtype.itemsize
    if dtype is torch.bool:
        return (torch.arange(n_bytes) % 3 == 0).reshape(shape)
    content = torch.arange(1, 252, dtype=torch.uint8).repeat(n_bytes // 251 + 1)[:n_bytes].clone()
    made: Any = torch.empty(0, dtype=dtype)
    # Sets the strides, too, because quantized dtypes have no code that computes them.
    strides = torch.empty(shape, device="meta").stride()
    made.set_(content.untyped_storage(), 0, shape, strides)
    return made  # type: ignore[no-any-return]
