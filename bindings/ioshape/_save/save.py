# SPDX-License-Identifier: Apache-2.0
"""save() and save_async()."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ioshape import _torch as original
from ioshape._core import trace
from ioshape._core.context import encoded
from ioshape._core.descriptors import is_pythons
from ioshape._core.errors import StorageError
from ioshape._core.report import Report, Step
from ioshape._core.under_way import (
    begun,
    raise_unheard,
    register,
)
from ioshape._device import outgoing as _outgoing  # noqa: F401 - begin.py wants it complete
from ioshape._native import ffi, lib
from ioshape._save import lazy as lazily
from ioshape._save import pickling, retention
from ioshape._save.atomic import AtomicFile
from ioshape._save.begin import records_of, start
from ioshape._save.handle import SaveHandle
from ioshape._save.request import SaveRequest
from ioshape._tier.route import completed_over, directly, route_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Literal

    import torch

    from ioshape._core.report import Progress
    from ioshape._tier.route import Route

_PROTOCOL = 2  # torch's default
_MOST_PADDING = 8 << 10


def is_ours(f: Any) -> bool:
    """Whether it is a file of ioshape.open(), or what DCP puts around one for an item of it."""
    return isinstance(f, AtomicFile) or isinstance(_attribute(f, "raw"), AtomicFile)


def _attribute(f: Any, name: str) -> Any:
    try:
        return getattr(f, name, None) if is_pythons(f) else None
    except Exception:  # a property of a class of the program
        return None


class _NoTargetError(TypeError, AttributeError):
    """It is an AttributeError because that is what torch.save raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_target, self.args


def _no_target(*arguments: object) -> _NoTargetError:
    return _NoTargetError(*arguments)


# Its name in tracebacks.
_NoTargetError.__module__, _NoTargetError.__name__ = "builtins", "TypeError"
_NoTargetError.__qualname__ = "TypeError"


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = _PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    durable: bool | Literal["destination"] | None = None,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
    keep_last: int | None = None,
) -> Report:
    """Saves an object as torch.save does, durably: when this returns, it is on stable storage.

    The first arguments are torch.save's, and so is the file: torch.load opens it. A reader sees the
    previous file or the new one, never half of one, whatever happens meanwhile. If the save fails
    or is interrupted (Ctrl-C), the previous file stays as it was.

    Args:
        obj: the object.
        f: the path; or a file object, to which torch itself then writes.
        pickle_module: as in torch.save.
        pickle_protocol: as in torch.save.
        durable: False returns without waiting for stable storage; the file is still complete or not
            there for readers. "destination" waits until a save over a tier is drained. Default: the
            setting "durable".
        replace: False raises FileExistsError if the path exists when the file is complete.
        progress: is called with a Progress now and then; an exception in it stops the save.
        deadline: seconds until the process will end. The save then goes before those of others, and
            leaves out what takes time; the report's `deadline_met` says whether it was in time. It
            goes on when the time is over. on_preemption() tells what is left. Default: none.
        tier: a folder on a fast disk of this node. When this returns, the file is on stable storage
            there; a thread then carries it to `f`, in its turn behind direct saves. The tier's
            journal lasts: what a process leaves there, the next one that saves there carries, or
            "ioshape drain". Until then only load(), load_latest(), verify(), inspect() and open()
            find the file. False saves directly. So do a `deadline`, replace=False, a full tier, and
            what torch writes itself; the report's `fallbacks` say why. Default: the setting "tier".
        keep_last: how many checkpoints of the path's family stay, the newest by their times of
            modification. The family is in the same directory, and its names differ in their last
            number alone: step-100.pt and step-200.pt. When the new file is safe, older ones are
            removed, if they are complete files of torch.save; links and damaged files stay, and do
            not count. A file that cannot be removed is a warning in the log. Over a tier only
            files at the destination count. Default: all stay.

    Returns:
        A Report: where the time went, and what was not as preferred. If the save did not fit into
        the free space and the setting "full" is "skip", its `skipped` is set, nothing was written,
        and a SkippedWarning was given.

    Raises:
        StorageError: the file could not be written. It is an OSError with errno and path.
        TypeError: `f` is neither a path nor a file object.
        ValueError: `keep_last` is less than 1, or the last number in the name does not count
            checkpoints: "last.pt", "step-100-rank-3.pt".

    What torch.save raises for objects that cannot be pickled, this raises.
    """
    if not isinstance(f, (str, os.PathLike)) and not hasattr(f, "write"):
        raise _NoTargetError(
            f"save() takes a path or a file object with write(), not {type(f).__name__}"
        )
    if keep_last is not None:
        if not isinstance(f, (str, os.PathLike)):
            raise ValueError("keep_last goes with a path, not with a file object")
        retention.check(os.fspath(f), keep_last)
    save = _TorchSave(
        obj,
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
        SaveRequest.of(durable, replace, progress, deadline, tier=tier),
    )
    if isinstance(f, (str, os.PathLike)):
        report = save.to_path(os.fspath(f))
        if keep_last is not None and not report.skipped:
            retention.after_save(os.fspath(f), keep_last, is_there=not report.tier)
    else:
        report = save.to_file_object(f)
    # After the new file is safe: no checkpoint is lost because an earlier one was.
    raise_unheard()
    return report


def save_async(
    obj: object,
    f: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = _PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    durable: bool | Literal["destination"] | None = None,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
    keep_last: int | None = None,
    optimizer: Any = None,
    lazy: bool = False,
) -> SaveHandle:
    """Begins to save an object, and returns as soon as the object may change again.

    What the caller waits for is pickling and one copy of the storages in memory; the rest happens
    on a thread of the library, without the GIL. Several saves may be under way; those to one path
    are put in place in the order of the calls, but one with a deadline waits for none. When they
    hold all of the staging memory (setting "staging_bytes"), the call waits for room.

    With `optimizer` the call hardly waits. Parameters that need gradients, and the optimizer's
    state, change in its step alone: they are copied while forward and backward go on, by a thread
    of the lowest priority, and a hook before the next step waits for what is left. All else is
    copied before the call returns. With `lazy`, you say that no storage from 1 MiB on changes until
    you call before_step(). If something does change, the save fails, as far as a sample tells. What
    does not fit into the staging memory is copied before the call returns.

    Arguments and file are those of save(); `progress` is called from other threads, too.

    Args:
        obj: as in save(), and so is what is not listed here.
        optimizer: a torch.optim.Optimizer, or a list of all that change what is saved.
        lazy: True for a loop of your own, without such an optimizer.

    Returns:
        A SaveHandle: done(), wait(), result(), report; it can be awaited. If the save fails and
        nobody asks, the next save raises the error, once it has saved, or begun to; or the end of
        the process reports it.

    Raises:
        What torch.save raises for objects that cannot be pickled. Failures of the file are raised
        by the handle.
    """
    if not isinstance(f, (str, os.PathLike)):
        raise TypeError(
            f"save_async() takes a path, not {type(f).__name__}; torch writes to file objects "
            "itself, while you wait: use save()"
        )
    if keep_last is not None:
        retention.check(os.fspath(f), keep_last)
    save = _TorchSave(
        obj,
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
        SaveRequest.of(durable, replace, progress, deadline, tier=tier),
    )
    if optimizer is None and not lazy:
        handle = save.begin(os.fspath(f))
    else:
        waiters = lazily.waiters_of(optimizer)
        handle = save.begin(os.fspath(f), lazily.steady(optimizer))
        lazily.watch(handle, waiters)
    if keep_last is not None:
        _remove_older_after(handle, keep_last)
    raise_unheard(but=handle)
    return handle


def _remove_older_after(handle: SaveHandle, keep_last: int) -> None:
    def ended(handle: SaveHandle) -> None:
        report = handle._report
        if handle._error is None and report is not None and not report.skipped:
            retention.after_save(handle.path, keep_last, is_there=not report.tier)

    handle.add_done_callback(ended)


def _begun(path: str, note: str) -> Report:
    """Of a save that torch is about to write."""
    return Report(
        path=path, written_by="torch", fallbacks=(Step(note, "torch"),), started_s=time.time()
    )


@dataclass
class _TorchSave:
    """An object that is saved as torch.save would, with torch.save's arguments."""

    obj: object
    pickle_module: Any
    protocol: int
    new_format: bool
    no_byteorder: bool
    request: SaveRequest

    # ---- Ways -------------------------------------------------------------------------------

    def to_path(self, path: str) -> Report:
        """Saves, and waits."""
        try:
            pickled, pickle_s = self._pickle(path)
        except pickling.Unsupported as reason:
            return self._by_torch(path, str(reason))
        # Nothing changes the object while its owner waits here, so nothing need be copied; and what
        # lies in a GPU is fetched while the disk is writing.
        route = self._route(pickled, path)
        return completed_over(
            route, lambda route: self._start(pickled, route, pickle_s, borrow=True)
        )

    def begin(
        self, path: str, is_steady: Callable[[torch.UntypedStorage], bool] | None = None
    ) -> SaveHandle:
        """Saves in the background; storages of which is_steady() says so are copied later."""
        try:
            pickled, pickle_s = self._pickle(path)
        except pickling.Unsupported as reason:
            # torch's own writer copies nothing, and keeps the GIL: it is done before we return.
            try:
                report = self._by_torch(path, f"{reason}; not in the background")
            except StorageError as error:
                handle = SaveHandle.ended(path, None, error)
            else:
                handle = SaveHandle.ended(path, report, None)
            register(handle, background=True)
            return handle
        route = self._route(pickled, path)
        return begun(lambda: self._start(pickled, route, pickle_s, is_steady, borrow=False))

    def to_file_object(self, f: Any) -> Report:
        """There is no path, so there is nothing to replace and nothing to sync."""
        if is_ours(f):
            self._torch_save(f)  # the file's own report is about it
            return Report(str(f.raw.name), written_by="torch")
        report = _begun(
            str(_attribute(f, "name") or ""),
            "torch wrote to the file object itself: neither atomic nor durable",
        )
        begin = time.perf_counter()
        try:
            self._torch_save(f)
        except (OSError, RuntimeError) as error:  # torch's writer raises both
            trace.record(replace(report, total_s=time.perf_counter() - begin), error=error)
            raise
        report = replace(report, total_s=time.perf_counter() - begin)
        trace.record(report)
        return report

    def _by_torch(self, path: str, reason: str) -> Report:
        """torch's own writer, but into a file of ours: still atomic and durable."""
        past = directly(
            path, "how long it will be is not known before" if self.request.tier else ""
        )
        steps = (Step(f"written by torch itself: {reason}", "torch"), *past.steps)
        with AtomicFile(path, self.request, written_by="torch", steps=steps) as file:
            self._torch_save(file)
        assert file.report is not None
        return file.report

    def _torch_save(self, f: IO[bytes]) -> None:
        original.save(
            self.obj, f, self.pickle_module, self.protocol, self.new_format, self.no_byteorder
        )

    # ---- Steps ------------------------------------------------------------------------------

    def _pickle(self, path: str) -> tuple[pickling.Pickled, float]:
        if not self.new_format:
            raise pickling.Unsupported("the format from before torch 1.6 was asked for")
        begin = time.perf_counter()
        pickling.check_arguments(path, self.pickle_module)
        pickled = pickling.collect(self.obj, self.pickle_module, self.protocol)
        return pickled, time.perf_counter() - begin

    def _route(self, pickled: pickling.Pickled, path: str) -> Route:
        records = pickled.records
        # Each begins behind a header, and at most so far behind the end of the one before.
        n_bytes = sum(record.n_bytes for record in records) + (len(records) + 1) * _MOST_PADDING
        return route_of(path, n_bytes, self.request)

    def _start(
        self,
        pickled: pickling.Pickled,
        route: Route,
        pickle_s: float,
        is_steady: Callable[[torch.UntypedStorage], bool] | None = None,
        *,
        borrow: bool,
    ) -> SaveHandle:
        context = route.context()
        payload = records_of(pickled, is_steady, route.place)

        def begin(records: Any, count: int, options: Any, out: Any) -> int:
            return lib.save_records_lazily(  # type: ignore[no-any-return]
                context.pointer,
                encoded(route.place),
                records,
                ffi.NULL if payload.later is None else payload.later,
                count,
                options,
                out,
            )

        return start(begin, context, route, payload, self.request, borrow=borrow, pickle_s=pickle_s)
