# SPDX-License-Identifier: Apache-2.0
"""Bytes between nodes, over torch.distributed: a gloo group that is used for nothing else.

The training's own group is never used. One of NCCL stops the job when a checkpoint is slow, and its
collectives must come in the same order on all ranks, which threads in the background cannot
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
    """What the library sends and receives by. It is called on the library's threads."""

    def __init__(self, process_group: Any, world: Any) -> None:
        import torch  # noqa: PLC0415 - a group of one node needs no torch to be imported here

        self._torch = torch
        self.process_group = process_group
        #: the default group that it was made from
        self.world = world
        self._said: str | None = None
        self._handle = ffi.new_handle(self)
        self.struct = sized("ioshape_comm")
        self.struct.user = self._handle
        self.struct.send = lib.ioshape_py_send
        self.struct.receive = lib.ioshape_py_receive

    def cause(self) -> BaseException | None:
        """What torch said of the last failure, once."""
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
        """What the library has called; a code for it."""
        if not n_bytes:
            return 0
        due = time.monotonic() + timeout_ms / 1000
        try:
            # The memory itself, not a copy.
            bytes_there = self._torch.frombuffer(
                ffi.buffer(memory, n_bytes), dtype=self._torch.uint8
            )
            # The group's own method: those of torch.distributed look at a registry that
            # destroy_process_group() empties, while a save may still be under way.
            work = transfer([bytes_there], other, tag)
            work.wait(timedelta(milliseconds=max(1, timeout_ms)))
        except Exception as error:
            # Not the exception: what it refers to would outlive this call, and with it the right
            # to write into the memory.
            self._said = f"torch.distributed, rank {other}: {error}".strip()
            # torch has one class for all failures; the clock tells a timeout from others.
            return -errno.ETIMEDOUT if time.monotonic() >= due else -errno.ECONNRESET
        return 0


def _to_c(kind: Any, value: Any, _traceback: Any) -> None:
    """Of what is no Exception, as when the interpreter ends: the library is told by the code."""
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
    """Made at the first call, which all ranks make within that time.

    None where torch.distributed is not set up. What torch raises, this raises.
    """
    global _comm  # noqa: PLW0603
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    world = distributed.group.WORLD
    if _comm is None or _comm.world is not world:
        if not distributed.is_gloo_available():
            return None
        # It meets at the store, not in the default group: nothing of NCCL's is waited for.
        # What is sent later has the time that the library gives it.
        timeout = timedelta(seconds=timeout_s)
        _comm = Comm(distributed.new_group(backend="gloo", timeout=timeout), world)
    return _comm
