# SPDX-License-Identifier: Apache-2.0
"""Copies between pinned memory and a device: all that this package asks of one.

What is here calls torch's interface for any accelerator, so that CUDA, ROCm and XPU are one case.
Tests put a device that they play in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    class CopyEvent(Protocol):
        """A point in the queue of copies."""

        def synchronize(self) -> None:
            """Waits until all copies before it are done. They may fail here."""

    class CopyStream(Protocol):
        """A queue of copies, done in their order, beside all else that the device does."""

        def pinned(self, n_bytes: int) -> torch.Tensor:
            """Memory of the CPU which the device reads and writes by itself."""

        def wait_for_caller(self) -> None:
            """Later copies come after all that this thread has asked the device to do until now."""

        def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
            """Queues a copy, and returns."""

        def compute(self, result: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
            """Queues what the call computes on the device, and a copy of its result."""

        def broadcast(self, memory: torch.Tensor, root: int) -> None:
            """Queues what all ranks do together: one sends its memory to that of the others."""

        def record(self) -> CopyEvent:
            """The point behind the last copy."""


# Copies of so much leave gaps for those of others, and cost many times their latency.
PIECE_BYTES = 16 << 20
# One that the CPU works on, one on its way, and one that is next.
BUFFERS = 3


class NoStreamError(RuntimeError):
    """The device has no such queue. The argument says why, for the report."""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage as a tensor of bytes, where it is."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def changed(tensor: torch.Tensor) -> None:
    """Tells autograd, which does not see what is written past it."""
    tell = getattr(torch.autograd.graph, "increment_version", None)
    if tell is not None and not tensor.is_inference():
        tell(tensor)


class _Stream:
    """A stream of torch's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.Stream(device)

    def pinned(self, n_bytes: int) -> torch.Tensor:
        # torch keeps it, touched and registered, for who asks for as much again.
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def wait_for_caller(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad(), self._stream:
            into.copy_(source, non_blocking=True)

    def compute(self, result: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
        with torch.no_grad(), self._stream:
            into.copy_(result(), non_blocking=True)

    def broadcast(self, memory: torch.Tensor, root: int) -> None:
        group: Any = torch.distributed.group.WORLD
        with self._stream:
            # The stream waits for it, not the caller.
            group.broadcast(memory, root).wait()

    def record(self) -> CopyEvent:
        event: CopyEvent = self._stream.record_event()
        return event


class _Done:
    """Of what was done at once."""

    def synchronize(self) -> None:
        pass


class Blocking:
    """In the place of a stream where there is none: each copy is done when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")

    def wait_for_caller(self) -> None:
        # Copies may be asked for on another thread, which has a stream of its own.
        if _accelerator_type() == self._device.type:
            torch.accelerator.synchronize(self._device)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            into.copy_(source)

    def compute(self, result: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
        into.copy_(result())

    def broadcast(self, memory: torch.Tensor, root: int) -> None:  # noqa: ARG002
        raise NoStreamError("ranks send each other what they have on streams")

    def record(self) -> CopyEvent:
        return _Done()


def _accelerator_type() -> str | None:
    """Of the device that torch computes on beside the CPU."""
    accelerator: Any = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None else None
    return None if current is None else str(current.type)


def open_stream(device: torch.device) -> CopyStream:
    """A queue of its own on this device.

    Raises:
        RuntimeError: it has none.
    """
    if device.type in ("cpu", "meta"):
        raise NoStreamError("it is no device with memory of its own")
    if _accelerator_type() != device.type:
        raise NoStreamError(f"torch {torch.__version__} has no accelerator of this type")
    if not hasattr(torch.Stream, "__enter__"):
        raise NoStreamError(f"torch {torch.__version__} cannot choose a stream for a copy")
    return _Stream(device)


def ranks_exchange(device: torch.device) -> bool:
    """Whether the ranks of the job have a way between their devices, without the CPU's memory."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    # NCCL knows one device of each rank: the current one.
    if torch.accelerator.current_device_index() != device.index:
        return False
    # As in "cpu:gloo,cuda:nccl".
    each = distributed.get_backend_config().split(",")
    backends = dict(one.split(":", 1) for one in each if ":" in one)
    return backends.get(device.type, "gloo") != "gloo"


def buffers_of(stream: CopyStream, n_bytes: int) -> list[torch.Tensor]:
    """What is copied through, for so many bytes in all.

    Raises:
        RuntimeError: there is no pinned memory, or none left.
    """
    size = max(1, min(PIECE_BYTES, n_bytes))
    # Another thread may copy to them, in another mode than the caller's.
    with torch.inference_mode(mode=False):
        return [stream.pinned(size) for _ in range(min(BUFFERS, -(-n_bytes // size)))]
