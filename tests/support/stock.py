# SPDX-License-Identifier: Apache-2.0
"""Runs torch.save and torch.load in a process that never imports ioshape.

Stock() starts that process and asks it to save and load. Its answers can be compared with the
results of this module's functions in the process of the tests.
"""

import atexit
import contextlib
import functools
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zoo
from same import describe
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import serialization
from tree import PYTHONPATH

# The type stubs lack attributes that config modules have at run time.
CONFIG: Any = serialization.config
_TORCH: Any = torch


class Outcome(NamedTuple):
    """The outcome of a save or a load: a description of its result, or its exception."""

    description: Any
    #: type and message; for one of our exceptions, those of torch that it stands for
    error: tuple[str, str] | None
    warnings: tuple[tuple[str, str], ...]


def _plain(message: object, path: Path) -> str:
    """Return a message without paths and addresses, which differ between processes and files."""
    text = str(message).replace(str(path), "PATH")
    return re.sub(r"0x[0-9a-f]+|object at \S+", "ADDRESS", text)


def attempt(function: Callable[[], Any], path: Path, *, with_data: bool = True) -> Outcome:
    """Call a function. Describe its result, exception and warnings."""
    description = error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _TORCH.storage._reset_warn_typed_storage_removal()  # else it comes once
        try:
            value = function()
        except Exception as raised:
            error = (type(raised).__name__, _plain(raised, path))
        told = tuple(
            (warning.category.__name__, _plain(warning.message, path))
            for warning in caught
            # Warnings from torch's C++ code come once per process.
            if "Triggered internally" not in str(warning.message)
        )
        if error is None:
            description = describe(value, with_data=with_data)
    return Outcome(description, error, told)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _CallsNothing(TorchFunctionMode):
    """A mode that intercepts all torch functions, like torch.device(), and changes nothing."""

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


# Contexts in which a process may save or load.
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: _default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "fake tensors": FakeTensorMode,
    "functions replaced": _CallsNothing,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


# ---- Ways to load -------------------------------------------------------------------------------


@contextmanager
def torch_setting(name: str, value: object) -> Iterator[None]:
    """Change an option of torch.utils.serialization.config temporarily."""
    with CONFIG.patch(name, value):
        yield


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables temporarily."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class Way:
    """A way to call torch.load."""

    options: dict[str, Any] = field(default_factory=dict)
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    with_data: bool = True


def _clone(storage: Any, _location: str) -> Any:
    return storage.clone()


@contextmanager
def _both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


_ALL = {"weights_only": False}

WAYS = {
    "default": Way(),
    "safe": Way({"weights_only": True}),
    "whole": Way(_ALL),
    "mapped": Way({**_ALL, "mmap": True}),
    "mapped, safe": Way({"mmap": True, "weights_only": True}),
    "mapped by setting": Way(_ALL, lambda: torch_setting("load.mmap", True)),
    "mapped, offsets computed": Way(
        {**_ALL, "mmap": True}, lambda: torch_setting("load.calculate_storage_offsets", True)
    ),
    "checked by torch": Way(_ALL, lambda: environment(TORCH_SERIALIZATION_DEBUG="1")),
    "mapped, checked by torch": Way(
        {**_ALL, "mmap": True},
        lambda: _both(
            torch_setting("load.calculate_storage_offsets", True),
            environment(TORCH_SERIALIZATION_DEBUG="1"),
        ),
    ),
    "to cpu": Way({**_ALL, "map_location": "cpu"}),
    "to a device": Way({**_ALL, "map_location": torch.device("cpu")}),
    "by a table": Way({**_ALL, "map_location": {"cpu": "meta"}}),
    "by a function": Way({**_ALL, "map_location": _clone}),
    "to meta": Way({**_ALL, "map_location": "meta"}),
    "to meta, safe": Way({"map_location": torch.device("meta"), "weights_only": True}),
    "fake": Way(_ALL, FakeTensorMode),
    "without data": Way(_ALL, torch.serialization.skip_data, with_data=False),
    "encoding": Way({**_ALL, "encoding": "latin1"}),
}


def load_by(load: Callable[..., Any], path: Path, way: str) -> Outcome:
    """Load a file in one way."""
    chosen = WAYS[way]

    def call() -> Any:
        with chosen.inside():
            return load(path, **chosen.options)

    return attempt(call, path, with_data=chosen.with_data)


def load_all_ways(load: Callable[..., Any], path: Path) -> dict[str, Outcome]:
    """Load a file in every way."""
    return {way: load_by(load, path, way) for way in WAYS}


# ---- The other process --------------------------------------------------------------------------


class Server:
    """The methods that the other process offers."""

    def save(self, name: str, path: Path) -> Outcome:
        """Save an object of the zoo by torch.save."""
        value = zoo.build(name)
        return attempt(lambda: torch.save(value, path), path)

    def load_all_ways(self, path: Path) -> dict[str, Outcome]:
        """Load a file by torch.load in every way."""
        return load_all_ways(torch.load, path)

    def load(self, path: Path, way: str = "whole") -> Outcome:
        """Load a file by torch.load in one way."""
        return load_by(torch.load, path, way)


def serve() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    sys.modules["ioshape"] = None  # type: ignore[assignment]
    server = Server()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pickle.load(sys.stdin.buffer)
            pickle.dump(getattr(server, method)(*arguments), answers)
            answers.flush()


class Stock:
    """A client of the other process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import stock; stock.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )

    def _ask(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def save(self, name: str, path: Path) -> Outcome:
        """Let it build an object of the zoo and save it by torch.save."""
        outcome: Outcome = self._ask("save", name, path)
        return outcome

    def load_all_ways(self, path: Path) -> dict[str, Outcome]:
        """Let it load a file by torch.load in every way."""
        outcomes: dict[str, Outcome] = self._ask("load_all_ways", path)
        return outcomes

    def load(self, path: Path, way: str = "whole") -> Outcome:
        """Let it load a file by torch.load in one way."""
        outcome: Outcome = self._ask("load", path, way)
        return outcome

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@functools.cache
def stock() -> Stock:
    """Return the process that all tests share."""
    process = Stock()
    atexit.register(process.close)
    return process
