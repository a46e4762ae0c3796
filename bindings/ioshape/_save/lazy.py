# SPDX-License-Identifier: Apache-2.0
"""Saves that copy their data while training goes on, until the next step of an optimizer.

The parameters and the state of an optimizer change in its step alone. So a save may copy them
later, and a hook before the step waits until they are copied.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    class Copying(Protocol):
        """A save that may have data left to copy."""

        _waiters: tuple[Steps, ...]

        def _wait_copied(self) -> None: ...


# With lazy=True, storages below this size are copied at once. Waiting for them later would cost as
# much.
_LARGE_BYTES = 1 << 20

#: saves that may have data left to copy
_copying: list[Copying] = []


# ---- Storages that are copied later -------------------------------------------------------------


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory that make up a tensor, such as a DTensor of FSDP2."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        # A DTensor also lists its mesh, which tensors_in() skips.
        yield from tensors_in([getattr(tensor, name) for name in flatten()[0]])
    elif tensor.layout is torch.strided:
        yield tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory in nested dictionaries, lists and tuples."""
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
    """Return a function that tells whether a storage changes only in an optimizer's step.

    That is so if all of its bytes belong to an optimizer. Without an optimizer, the program
    promises that nothing changes before it calls before_step(); then all large storages qualify.
    """
    if optimizer is None:
        return lambda storage: storage.nbytes() >= _LARGE_BYTES
    parts: dict[tuple[torch.device, int], set[tuple[int, int]]] = {}
    for one in _listed(optimizer):
        params = [param for group in one.param_groups for param in group["params"]]
        owned = [param for param in params if param.requires_grad]
        for tensor in tensors_in([owned, list(one.state.values())]):
            extent = int(tensor.storage_offset()), tensor.numel() * tensor.element_size()
            parts.setdefault(_key(tensor.untyped_storage()), set()).add(extent)

    def is_steady(storage: torch.UntypedStorage) -> bool:
        return sum(n for _, n in parts.get(_key(storage), ())) >= storage.nbytes() > 0

    return is_steady


# ---- Steps --------------------------------------------------------------------------------------


class Steps:
    """The sequence of steps of one optimizer, or of a loop that calls before_step()."""

    def next(self) -> None:
        """Record that a step begins. Wait until the data that it changes is copied."""
        for one in list(_copying):
            if self in one._waiters:
                _wait(one)


def _wait(save: Copying) -> None:
    save._wait_copied()
    if save in _copying:
        _copying.remove(save)


_of_loop = Steps()
_of_optimizers: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()


def steps_of(optimizer: Any) -> Steps:
    """Return the steps of an optimizer. The first call registers a hook before each step."""
    register = getattr(optimizer, "register_step_pre_hook", None)
    if register is None:
        raise TypeError(
            f"save_async() takes optimizers of torch, not {type(optimizer).__name__}; use "
            "lazy=True, and call ioshape.before_step() before it changes tensors"
        )
    steps = _of_optimizers.get(optimizer)
    if steps is None:
        steps = _of_optimizers[optimizer] = Steps()
        begins = steps.next
        register(lambda *_: begins())
    return steps


def before_step() -> None:
    """Wait until all saves with `lazy=True` or an `optimizer` have copied their data.

    In a training loop of your own, call it before you change anything that such a save was given.
    If there is no such save, it returns at once. Any thread may call it.
    """
    for save in list(_copying):
        _wait(save)


def waiters_of(optimizer: Any) -> tuple[Steps, ...]:
    """Return the steps that wait for a save: those of the optimizers, or of the program's loop."""
    if optimizer is None:
        return (_of_loop,)
    waiters = tuple(map(steps_of, _listed(optimizer)))
    if not waiters:
        raise ValueError("optimizer is empty: give the optimizers that change the saved tensors")
    return waiters


def watch(save: Copying, waiters: tuple[Steps, ...]) -> None:
    """Make these steps wait for a save from now on."""
    save._waiters = waiters
    _copying.append(save)
