# SPDX-License-Identifier: Apache-2.0
"""Copy state dicts for background saves, to memory that is kept from save to save.

Touching new memory costs several times as much as the copy. The memory of a copy is kept when the
copy has been freed, until saves come that cannot use it. Several threads copy large storages
together, because torch itself has only one thread under torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_saver

from ioshape._core.errors import failure
from ioshape._core.locks import module_lock
from ioshape._native import ffi, lib
from ioshape._save import lazy as lazily

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._save.lazy import Steps

    #: storages to fill, each with its source
    _Pairs = list[tuple[torch.UntypedStorage, torch.UntypedStorage]]

try:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
except ImportError:  # torch has none yet
    StateDictStager = None  # type: ignore[assignment, misc]

# Smaller copies use malloc(), which keeps memory, too.
_LEAST_BYTES = 1 << 20
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)

# ---- Memory -------------------------------------------------------------------------------------

_lock = module_lock()
#: free memory by size in bytes, and for each size the number of copies since it was last used
_free: dict[int, list[mmap.mmap]] = {}
_MOST_IDLE = 2
_idle: dict[int, int] = {}


def _begin_copy() -> None:
    """Free the memory that the last copies have not used."""
    with _lock:
        for size in list(_free):
            _idle[size] = _idle.get(size, 0) + 1
            if _idle[size] > _MOST_IDLE:
                del _free[size], _idle[size]


def _give_back(size: int, memory: mmap.mmap) -> None:
    with _lock:
        _free.setdefault(size, []).append(memory)


def _take(size: int) -> mmap.mmap:
    with _lock, contextlib.suppress(KeyError, IndexError):
        _idle[size] = 0
        return _free[size].pop()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        memory.madvise(_HUGE)
    return memory


def _storage(size: int) -> torch.UntypedStorage:
    memory = _take(size)
    block = (ctypes.c_char * size).from_buffer(memory)
    weakref.finalize(block, _give_back, size, memory).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8).untyped_storage()


# ---- Copying ------------------------------------------------------------------------------------

# A step that waits may have to wait for a slice whose thread is not running, so slices are small.
_SLICE_BYTES = 1 << 20
_LONGEST_REST_S = 0.01


def _copier() -> Any:
    """Return the threads of a copy, as many as a save of the library uses."""
    return ffi.gc(lib.base_copier_open(), lib.base_copier_free)


def _address(storage: torch.UntypedStorage) -> Any:
    return ffi.cast("char *", storage.data_ptr())


def _copy(pairs: _Pairs) -> None:
    copier = _copier()
    for to, source in pairs:
        lib.base_copier_copy(copier, _address(to), _address(source), source.nbytes())


class _Later:
    """Storages that change only in an optimizer step, copied in the background until then.

    Each thread takes the next slice when it has finished one.
    """

    def __init__(
        self,
        pairs: _Pairs,
        tensors: list[torch.Tensor],
        path: str,
        tell_failure: Callable[[Exception], object],
    ) -> None:
        self._pairs = pairs  # keeps both storages until all is copied
        self._slices = deque(
            (_address(to) + begin, _address(source) + begin, min(size - begin, _SLICE_BYTES))
            for to, source in pairs
            for size in (source.nbytes(),)
            for begin in range(0, size, _SLICE_BYTES)
        )
        self._last = len(self._slices) - 1
        self._copied = itertools.count()
        self._path = path
        self._tell_failure = tell_failure
        self._owner = os.getpid()
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._ended = threading.Event()
        self._hurry = threading.Event()
        #: the future and the copy that will be its result
        self._result: list[tuple[Future[Any], Any]] = []
        #: the step trackers that wait for this copy: see lazy.py
        self._waiters: tuple[Steps, ...] = ()

    def start(self, copied: Any) -> Future[Any]:
        """Start copying in the background; return a future that gets `copied` as its result."""
        future: Future[Any] = Future()
        self._result.append((future, copied))
        if not self._slices:
            self._end()
            return future
        helper = threading.Thread(target=self._copy_in_background, name="ioshape", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads are possible
            self._copy_rest()
        return future

    def _copy_next(self, copier: Any) -> bool:
        """Copy the next slice; return False if none is left.

        Another thread may still be copying the last slice then.
        """
        try:
            to, source, n_bytes = self._slices.popleft()
        except IndexError:
            return False
        try:
            lib.base_copier_copy(copier, to, source, n_bytes)  # without the GIL
        finally:  # also on KeyboardInterrupt, when the slice is copied: no other thread counts it
            if next(self._copied) == self._last:
                self._end()
        return True

    def _copy_rest(self) -> None:
        copier = _copier()
        while self._copy_next(copier):
            pass

    def _copy_in_background(self) -> None:
        # The thread's priority is not lowered: with the GIL it would block the interpreter for
        # longer.
        while True:
            begin = time.perf_counter()
            if not self._copy_next(ffi.NULL):
                return
            self._hurry.wait(min(time.perf_counter() - begin, _LONGEST_REST_S))

    def _end(self) -> None:
        future, copied = self._result.pop()
        changed = [tensor for tensor, version in self._versions if tensor._version != version]
        self._pairs, self._versions = [], []
        self._ended.set()
        if changed:
            self._tell_failure(
                failure(
                    lib.IOSHAPE_E_CHANGED,
                    f'cannot save "{self._path}": a tensor of shape {tuple(changed[0].shape)} '
                    "changed before ioshape had copied it",
                    self._path,
                    "save",
                    remedy="call ioshape.before_step() before it changes",
                )
            )
        # Also after a failure: a rank without a copy would not join the save, where the others
        # wait.
        future.set_result(copied)

    def _wait_copied(self) -> None:
        """Wait until the sources of the copy may change."""
        if self._owner == os.getpid():  # a forked child lacks the thread
            self._hurry.set()
            self._copy_rest()
            self._ended.wait()


# ---- State dicts --------------------------------------------------------------------------------


def copy_of(state_dict: Any) -> Any:
    """Return a copy of all that a state dict contains; None if torch must make it."""
    if not _CAN_STAGE:
        return None
    _begin_copy()
    stager = _Stager()
    copied = stager.stage(state_dict)
    now, _ = stager.take()
    _copy(now)
    return copied


def copy_later(
    state_dict: Any, optimizer: Any, path: str, tell_failure: Callable[[Exception], object]
) -> Any:
    """Return a future of a copy, for which storages are copied in the background.

    These are the storages that an optimizer changes, or without one all large ones, and the program
    says when they change. Before the future has a result, `tell_failure` is called if the copy is
    unusable. If torch would ignore a future, return what copy_of() returns.
    """
    if not _CAN_STAGE or not hasattr(state_dict_saver, "AsyncSaveResponse"):
        return copy_of(state_dict)
    waiters = lazily.waiters_of(optimizer)
    _begin_copy()
    stager = _Stager(lazily.steady(optimizer))
    copied = stager.stage(state_dict)
    now, steady = stager.take()
    _copy(now)
    addresses = {source.data_ptr() for _, source in steady}
    tensors = [
        tensor
        for tensor in lazily.tensors_in(state_dict)
        if tensor.untyped_storage().data_ptr() in addresses and not tensor.is_inference()
    ]
    later = _Later(steady, tensors, path, tell_failure)
    future = later.start(copied)
    lazily.watch(later, waiters)
    return future


_CAN_STAGE = hasattr(StateDictStager, "_stage_untyped_storage")

if _CAN_STAGE:

    class _Stager(StateDictStager):
        """torch's own stager, which knows all kinds of tensors, with memory that is kept."""

        def __init__(
            self, is_steady: Callable[[torch.UntypedStorage], bool] = lambda _storage: False
        ) -> None:
            super().__init__()
            self._is_steady = is_steady
            self._now: _Pairs = []
            self._later: _Pairs = []

        def take(self) -> tuple[_Pairs, _Pairs]:
            """Return the pairs to copy now and the pairs to copy later, and forget them.

            The stager is part of a reference cycle and would keep the storages until a garbage
            collection.
            """
            taken = self._now, self._later
            self._now, self._later = [], []
            return taken

        def _offload_tensor(
            self, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False
        ) -> Any:
            offload: Any = super()._offload_tensor
            copied = offload(x, memo, non_blocking=non_blocking)
            # torch forgets these bits, which are not in the memory. They are set in place, because
            # other objects may refer to the copy already.
            if x.is_conj() != copied.is_conj():
                torch._C._set_conj(copied, x.is_conj())
            if x.is_neg() != copied.is_neg():
                torch._C._set_neg(copied, x.is_neg())
            return copied

        def _stage_untyped_storage(
            self, storage: torch.UntypedStorage, non_blocking: bool = False
        ) -> torch.UntypedStorage:
            size = storage.nbytes()
            if storage.device.type == "cpu" and size >= _LEAST_BYTES:
                copied = _storage(size)
                pairs = self._later if self._is_steady(storage) else self._now
                pairs.append((copied, storage))
                return copied
            # torch keeps pinned memory itself.
            is_pinned = storage.device.type == "cuda"
            memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            copied = memory.untyped_storage()
            copied.copy_(storage, non_blocking=non_blocking)
            return copied
