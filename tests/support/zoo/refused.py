# SPDX-License-Identifier: Apache-2.0
"""Objects that cannot be saved."""

import io
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from zoo.cases import build


def too_deep() -> Any:
    """Return a list that is nested deeper than any pickler can follow."""
    value: Any = torch.arange(3)
    for _ in range(100_000):
        value = [value]
    return value


def not_picklable() -> dict[str, Callable[[], Any]]:
    """Return objects that cannot be saved, each for another reason."""

    class Local:
        pass

    def raising() -> Any:
        raise ValueError("nobody calls this")

    class Refuses:
        def __reduce__(self) -> NoReturn:
            raise ZeroDivisionError("I am not to be saved")

    return {
        "lambda": lambda: [torch.arange(3), lambda: 1],
        "local class": Local,
        "local function": lambda: raising,
        "file": lambda: io.FileIO("/dev/null"),
        "generator": lambda: (i for i in range(3)),
        "lock": lambda: {"lock": threading.Lock()},
        "thread": threading.Thread,
        "its own error": Refuses,
        "module": lambda: types,
        "two dtypes": lambda: build("storage_of_two_dtypes"),
        "memory format": lambda: torch.channels_last,
        "meta storage": lambda: build("meta_storage"),
        "script module": lambda: torch.jit.script(nn.Linear(2, 3)),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        "mapping": lambda: types.MappingProxyType({"a": 1}),
        "weak reference": lambda: weakref.ref(Local),
        "too deep": too_deep,
    }
