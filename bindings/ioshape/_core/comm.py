# SPDX-License-Identifier: Apache-2.0
"""Bytes between nodes, sent over torch.distributed by a gloo group of ioshape's own.

The training's process group is never used. An NCCL group would stop the job when a checkpoint is
slow. Its collectives must also run in one order on all ranks, which background threads cannot
promise.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ioshape._core.log import logger
from ioshape._core.structs import called_from_c, sized
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable


class Comm:
    """The functions by which the library sends and receives. The library's threads call them."""

    def __init__(self, process_group: Any, world: Any) -> None:
        import torch  # noqa: PLC0415 - a group of one node needs no torch to be imported here

        self._torch = torch
        self.process_group = process_group
        #: the default process group that existed when `process_group` was made
        self.world = world
        self._said: str | None = None
        self._handle = ffi.new_handle(self)
        self.struct = sized("ioshape_comm")
        self.struct.user = self._handle
        self.struct.send = lib.ioshape_py_send
        self.struct.receive = lib.ioshape_py_receive

    def cause(self) -> BaseException | None:
        """Return the last failure that torch reported, as an exception, and forget it.

        Return None if there was no failure since the last call.
        """
        said, self._said = self._said, None
        return ConnectionError(said) if said is not None else None

    def transfer(
        self,
        transfer: Callable[[list[Any], int, int], Any],
        memory: Any,
        n_bytes: int,
        other: int,
        tag: int,
        timeout_ms: int,
    ) -> int:
        """Send or receive `n_bytes` at `memory`. Return 0 or a negative errno for the library."""
        if not n_bytes:
            return 0
        due = time.monotonic() + timeout_ms / 1000
        try:
            # frombuffer() refers to the library's memory. It makes no copy.
            bytes_there = self._torch.frombuffer(
                ffi.buffer(memory, n_bytes), dtype=self._torch.uint8
            )
            # Call the group's own method. The functions of torch.distributed look the group up in a
            # registry, which destroy_process_group() empties while a save may still be in progress.
            work = transfer([bytes_there], other, tag)
            work.wait(timedelta(milliseconds=max(1, timeout_ms)))
        except Exception as error:
            # Keep the text only. The exception's traceback refers to the memory, and could still
            # write to it after this call, when the library has reused it.
            self._said = f"torch.distributed, rank {other}: {error}".strip()
            # torch raises one class for all failures, so only the clock shows that it was a
            # timeout.
            return -errno.ETIMEDOUT if time.monotonic() >= due else -errno.ECONNRESET
        return 0


def _to_c(kind: Any, value: Any, _traceback: Any) -> None:
    """Log an exception that is not an Exception, such as one raised while Python shuts down.

    The library learns of the failure by the error code that called_from_c() returns.
    """
    if kind is not None:
        with contextlib.suppress(Exception):
            logger().error("cannot send or receive: %r", value)


@called_from_c(error=-errno.ECONNRESET, onerror=_to_c)
def ioshape_py_send(comm: Comm, to: int, tag: int, data: Any, n_bytes: int, timeout_ms: int) -> int:
    return comm.transfer(comm.process_group.send, data, n_bytes, to, tag, timeout_ms)


@called_from_c(error=-errno.ECONNRESET, onerror=_to_c)
def ioshape_py_receive(
    comm: Comm, source: int, tag: int, into: Any, n_bytes: int, timeout_ms: int
) -> int:
    return comm.transfer(comm.process_group.recv, into, n_bytes, source, tag, timeout_ms)


_comm: Comm | None = None


def of_torch(timeout_s: float) -> Comm | None:
    """Return the process's sender and receiver. The first call makes its gloo group.

    The first call is collective: all ranks must make it within `timeout_s` seconds. Return None if
    torch.distributed is not initialised or has no gloo. Exceptions of torch are passed on.
    """
    global _comm  # noqa: PLW0603
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    world = distributed.group.WORLD
    if _comm is None or _comm.world is not world:
        if not distributed.is_gloo_available():
            return None
        # new_group() meets through the store and not through the default group. So it waits for no
        # work of NCCL. Each later transfer has a timeout of its own, which the library sets.
        timeout = timedelta(seconds=timeout_s)
        _comm = Comm(distributed.new_group(backend="gloo", timeout=timeout), world)
    return _comm
