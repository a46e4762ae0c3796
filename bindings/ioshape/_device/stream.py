# SPDX-License-Identifier: Apache-2.0
"""The interface to a device: copies between pinned memory and the device, and streams.

This module uses torch's interface for any accelerator, so CUDA, ROCm and XPU are one case. Tests
replace it by a simulated device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    class CopyEvent(Protocol):
        """A point in the queue of copies."""

        def synchronize(self) -> None:
            """Wait until all copies before it are done. Raise RuntimeError if one has failed."""

    class CopyStream(Protocol):
        """A queue of copies, which run in order, beside all other work of the device."""

        def pinned(self, n_bytes: int) -> torch.Tensor:
            """Return host memory that the device can read and write by itself."""

        def wait_for_caller(self) -> None:
            """Make later copies wait for all work that this thread has queued so far."""

        def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
            """Queue a copy and return."""

        def compute(self, result: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
            """Queue a computation on the device and a copy of its result."""

        def broadcast(self, memory: torch.Tensor, root: int) -> None:
            """Queue a broadcast, which all ranks must do: `root` sends its memory to the others."""

        def record(self) -> CopyEvent:
            """Return an event behind the last copy."""


# Copies of this size take many times their latency, and still leave gaps for copies of others.
PIECE_BYTES = 16 << 20
# One buffer that the CPU works on, one that is being copied, and one that is next.
BUFFERS = 3


class NoStreamError(RuntimeError):
    """A device without such a queue. The argument is the reason, for the report."""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes on its device."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as a tensor of bytes on its device."""
    begin = tensor.storage_offset() * tensor.element_size()
    return bytes_of(tensor.untyped_storage())[begin : begin + tensor.nbytes]


def changed(tensor: torch.Tensor) -> None:
    """Tell autograd that a tensor has changed, because it does not see writes to the memory."""
    tell = getattr(torch.autograd.graph, "increment_version", None)
    if tell is not None and not tensor.is_inference():
        tell(tensor)


class _Stream:
    """A CopyStream over a stream of torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.Stream(device)

    def pinned(self, n_bytes: int) -> torch.Tensor:
        # torch caches pinned memory for later requests of this size, so it is touched and
        # registered.
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
            # wait() makes this stream wait for the broadcast. The caller does not wait.
            group.broadcast(memory, root).wait()

    def record(self) -> CopyEvent:
        event: CopyEvent = self._stream.record_event()
        return event


class _Done:
    """The event of a copy that was blocking."""

    def synchronize(self) -> None:
        pass


class Blocking:
    """A CopyStream without a stream: each copy is done when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pinned(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")

    def wait_for_caller(self) -> None:
        # Copies may run on another thread, which has a current stream of its own.
        if _accelerator_type() == self._device.type:
            torch.accelerator.synchronize(self._device)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            into.copy_(source)

    def compute(self, result: Callable[[], torch.Tensor], into: torch.Tensor) -> None:
        into.copy_(result())

    def broadcast(self, memory: torch.Tensor, root: int) -> None:  # noqa: ARG002
        raise NoStreamError("ranks can only send each other data on streams")

    def record(self) -> CopyEvent:
        return _Done()


def _accelerator_type() -> str | None:
    """Return the type of the accelerator that torch uses; None if there is none."""
    accelerator: Any = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None else None
    return None if current is None else str(current.type)


def open_stream(device: torch.device) -> CopyStream:
    """Return a new queue of copies on this device.

    Raises:
        RuntimeError: The device or this torch does not support one.
    """
    if device.type in ("cpu", "meta"):
        raise NoStreamError("it is not a device with its own memory")
    if _accelerator_type() != device.type:
        raise NoStreamError(f"torch {torch.__version__} has no accelerator of this type")
    if not hasattr(torch.Stream, "__enter__"):
        raise NoStreamError(f"torch {torch.__version__} cannot choose a stream for a copy")
    return _Stream(device)


def ranks_exchange(device: torch.device) -> bool:
    """Return whether the ranks can exchange data between their devices, without host memory."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    # NCCL uses one device for each rank: the current one.
    if torch.accelerator.current_device_index() != device.index:
        return False
    # The configuration looks like "cpu:gloo,cuda:nccl".
    each = distributed.get_backend_config().split(",")
    backends = dict(one.split(":", 1) for one in each if ":" in one)
    return backends.get(device.type, "gloo") != "gloo"


def buffers_of(stream: CopyStream, n_bytes: int) -> list[torch.Tensor]:
    """Return the buffers for copies of `n_bytes` in all.

    Raises:
        RuntimeError: The device has no pinned memory, or none is left.
    """
    size = max(1, min(PIECE_BYTES, n_bytes))
    # Another thread, with another inference mode than the caller's, may copy to them.
    with torch.inference_mode(mode=False):
        return [stream.pinned(size) for _ in range(min(BUFFERS, -(-n_bytes // size)))]
