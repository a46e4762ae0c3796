# SPDX-License-Identifier: Apache-2.0
"""Saves that copy while training goes on, until the next step of an optimizer.

What an optimizer updates, and what it keeps, changes in its step and nowhere else. So a save may
copy that later, and a hook before the step waits for what is left.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ioshape._core import under_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    class Copying(Protocol):
        """A save that may have something to copy."""

        _waiters: tuple[Steps, ...]
        _steps: Steps | None

        def _wait_copied(self) -> None: ...


# Less is copied at once when the program has said that nothing changes: it costs as much to wait.
_LARGE_BYTES = 1 << 20
# Steps without a save that one with a save is compared with.
_STEPS = 50
_FEWEST_STEPS = 5

#: saves that may have something to copy
_copying: list[Copying] = []


# ---- What is copied later -----------------------------------------------------------------------


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that one of a subclass, as of FSDP2, is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        # Of a DTensor also its mesh.
        yield from tensors_in([getattr(tensor, name) for name in flatten()[0]])
    elif tensor.layout is torch.strided:
        yield tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those with memory, of dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield from _plain(value)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _key(storage: torch.UntypedStorage) -> tuple[torch.device, int]:
    return storage.device, storage.data_ptr()


def _listed(optimizer: Any) -> tuple[Any, ...]:
    return tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)


def steady(optimizer: Any) -> Callable[[torch.UntypedStorage], bool]:
    """Tells which storages change in a step only: all of their bytes are an optimizer's.

    Without one, the program has said that nothing changes before it calls before_step().
    """
    if optimizer is None:
        return lambda storage: storage.nbytes() >= _LARGE_BYTES
    parts: dict[tuple[torch.device, int], set[tuple[int, int]]] = {}
    for one in _listed(optimizer):
        params = [param for group in one.param_groups for param in group["params"]]
        owned = [param for param in params if param.requires_grad]
        for tensor in tensors_in([owned, list(one.state.values())]):
            place = int(tensor.storage_offset()), tensor.numel() * tensor.element_size()
            parts.setdefault(_key(tensor.untyped_storage()), set()).add(place)

    def is_steady(storage: torch.UntypedStorage) -> bool:
        return sum(n for _, n in parts.get(_key(storage), ())) >= storage.nbytes() > 0

    return is_steady


# ---- Steps --------------------------------------------------------------------------------------


class Steps:
    """The steps of one optimizer, or of a loop that calls before_step()."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._saving = False  # a save was under way when the last one began
        self._plain: deque[float] = deque(maxlen=_STEPS)

    def next(self) -> None:
        """A step begins: what it changes is copied first."""
        took = time.perf_counter() - self._last_s
        saves = [save for save in under_way.all_under_way() if save._steps is self]
        if self._saving or saves:
            for save in saves:
                save._step_s.append(took)
        elif self._last_s:
            self._plain.append(took)
        for one in list(_copying):
            if self in one._waiters:
                _wait(one)
        self._saving = bool(saves)
        self._last_s = time.perf_counter()

    def slowdown(self, took: list[float]) -> float | None:
        """How these compare with steps without a save; None if there were too few."""
        # The first of them began before the save did.
        if len(self._plain) < _FEWEST_STEPS or len(took) < 2:
            return None
        return median(took[1:]) / median(self._plain)


def _wait(save: Copying) -> None:
    save._wait_copied()
    if save in _copying:
        _copying.remove(save)


_of_loop = Steps()
_of_optimizers: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()


def steps_of(optimizer: Any) -> Steps:
    """Those of an optimizer, which calls us before each from now on."""
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is None:
        raise TypeError(
            f"save_async() takes optimizers of torch, not {type(optimizer).__name__}; use "
            "lazy=True, and call ioshape.before_step() before it changes anything"
        )
    steps = _of_optimizers.get(optimizer)
    if steps is None:
        steps = _of_optimizers[optimizer] = Steps()
        begins = steps.next
        register(lambda *_: begins())
    return steps


def before_step() -> None:
    """Waits until all saves with `lazy=True` or an `optimizer` have copied what they save.

    Call it in a loop of your own before anything changes that such a save was given.
    """
    _of_loop.next()
    for save in list(_copying):
        _wait(save)


def waiters_of(optimizer: Any) -> tuple[Steps, ...]:
    """Who waits for a save: the steps of these optimizers, or of the program's loop."""
    if optimizer is None:
        return (_of_loop,)
    waiters = tuple(map(steps_of, _listed(optimizer)))
    if not waiters:
        raise ValueError("optimizer is empty: give those that change what is saved")
    return waiters


def watch(save: Copying, waiters: tuple[Steps, ...]) -> None:
    """From here on these wait for it."""
    save._waiters = waiters
    save._steps = waiters[0]
    _copying.append(save)
