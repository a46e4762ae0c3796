# SPDX-License-Identifier: Apache-2.0
"""ioshape.save() and ioshape.save_async()."""

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
from ioshape._core.report import Downgrade, Report
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
_MOST_PADDING = 8 << 10  # most bytes in the file between the data of two records


def is_ours(f: Any) -> bool:
    """Return whether `f` is a file of ioshape.open(), or DCP's wrapper around one."""
    return isinstance(f, AtomicFile) or isinstance(_attribute(f, "raw"), AtomicFile)


def _attribute(f: Any, name: str) -> Any:
    try:
        return getattr(f, name, None) if is_pythons(f) else None
    except Exception:  # a property of the program's class may raise anything
        return None


class _NoTargetError(TypeError, AttributeError):
    """A TypeError for a target without write(). torch.save raises an AttributeError for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_target, self.args


def _no_target(*arguments: object) -> _NoTargetError:
    return _NoTargetError(*arguments)


# Tracebacks show it as a plain TypeError.
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
    """Save an object as torch.save does, atomically and durably.

    When the call returns, the file is on stable storage. The file and the first arguments are those
    of torch.save, so torch.load opens the file. A reader always sees the previous file or the new
    one, and never a partial file. If the save fails or Ctrl-C interrupts it, the previous file
    stays.

    Any thread may call this. Once the interpreter shuts down, only the main thread and callbacks of
    saves may.

    Args:
        obj: The object to save. It must not change during the call.
        f: A path, or a file object. torch itself writes to a file object, neither atomically nor
            durably.
        pickle_module: As in torch.save.
        pickle_protocol: As in torch.save.
        _use_new_zipfile_serialization: As in torch.save. With False, torch writes the bytes itself.
        _disable_byteorder_record: As in torch.save.
        durable: False returns without waiting for stable storage. The file is still atomic for
            readers. "destination" waits until a save over a tier is drained. Default: the setting
            "durable".
        replace: False raises FileExistsError if the path exists when the new file is complete.
            Default: True.
        progress: A function that is called with a Progress from time to time, also on threads of
            the library. An exception in it stops the save, and this call raises it. Default: none.
        deadline: Seconds until the process will end. The save then gets its slot before saves
            without a deadline, and skips optional work. It continues after the deadline. The
            report's `deadline_met` tells whether it was in time. on_preemption() measures the time
            left. Default: none.
        tier: A folder on a fast disk of this node. The call returns when the file is on stable
            storage there. A background thread then copies it to `f`, after direct saves. If the
            process ends before that, the next process that saves on this tier copies it, or
            "ioshape drain" does. Until it is copied, only load(), load_latest(), verify(),
            inspect() and open() find the file. False saves directly. A save with a `deadline`, with
            replace=False or by torch itself is also direct. While the tier is full, all saves are
            direct. The report's `downgrades` give the reason. Default: the setting "tier".
        keep_last: The number of checkpoints of the path's family to keep, the newest by
            modification time. A family is all files in the directory whose names differ only in
            their last number: step-100.pt and step-200.pt. When the new file is safe, older ones
            are removed. Only complete files of torch.save are removed and counted; links and
            damaged files stay. A file that cannot be removed gives a warning in the log. With a
            tier, only files at the destination count. Default: keep all.

    Returns:
        A Report with the timing breakdown and the downgrades. If the file did not fit and the
        setting "full" is "skip", nothing was written. The report then has `skipped` set, and a
        SkippedWarning was issued.

    Raises:
        StorageError: The file could not be written. It is an OSError with errno and path. An
            earlier background save whose failure the program has not seen also raises its error
            here, after the new file is safe.
        TypeError: `f` is neither a path nor a file object.
        ValueError: `keep_last` is less than 1, or the last number of the name does not count
            checkpoints ("last.pt", "step-100-rank-3.pt"), or an argument is invalid.
        RuntimeError: The interpreter is shutting down, and this is neither the main thread nor a
            callback.

    Exceptions of torch.save for objects that cannot be pickled are passed on.
    """
    if not isinstance(f, (str, os.PathLike)) and not hasattr(f, "write"):
        raise _NoTargetError(
            f"save() takes a path or a file object with write(), not {type(f).__name__}"
        )
    if keep_last is not None:
        if not isinstance(f, (str, os.PathLike)):
            raise ValueError("keep_last takes a path, not a file object")
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
    # Only now that the new file is safe: an earlier failure must not cost this checkpoint.
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
    """Start to save an object in the background, and return as soon as the object may change.

    The caller waits for pickling and for one copy of the storages in memory. A thread of the
    library does the rest without the GIL. Several saves may be in progress. Saves to one path are
    put in place in the order of the calls, except that a save with a deadline waits for none. If
    earlier saves hold all of the staging memory (setting "staging_bytes"), the call waits until
    some is free.

    With `optimizer` the call hardly waits. Parameters that need gradients, and the optimizer's
    state, change only in its step. A thread of the lowest priority copies them during forward and
    backward, and a hook before the next step waits for the rest. Everything else is copied before
    the call returns.

    With `lazy` you promise that storages of 1 MiB and more stay unchanged until you call
    before_step(). If such a storage does change, the save fails, as far as a sample of its bytes
    reveals it. Data that does not fit into the staging memory is copied before the call returns.

    The file is that of save(). Any thread may call this. Once the interpreter shuts down, only the
    main thread and callbacks of saves may.

    Args:
        obj: The object to save. It may change once the call returns, apart from what is said above
            about `optimizer` and `lazy`.
        f: The path. File objects are not accepted.
        pickle_module: As in torch.save.
        pickle_protocol: As in torch.save.
        _use_new_zipfile_serialization: As in torch.save. With False, torch writes the file itself
            before the call returns.
        _disable_byteorder_record: As in torch.save.
        durable: As in save(), for the end of the background save.
        replace: As in save(). The handle raises FileExistsError.
        progress: As in save(). Most calls come on threads of the library, and may come from two
            threads at once. The handle raises an exception of the function.
        deadline: As in save().
        tier: As in save(). The background save ends when the file is on the tier.
        keep_last: As in save(). Older files are removed when the background save has ended.
        optimizer: A torch.optim.Optimizer, or a list of all optimizers that change the object.
            Default: none.
        lazy: True for a training loop of your own that calls before_step(). Default: False.

    Returns:
        A SaveHandle with done(), wait(), result() and report. It can be awaited. If the save fails
        and the program never asks for the outcome, the next save raises the error after it has
        saved or started. If there is no next save, the process prints the error at its end.

    Raises:
        StorageError: An earlier background save failed, and the program has not seen it. This save
            has been started nevertheless. The handle raises failures of this save.
        TypeError: `f` is not a path, or `optimizer` is not an optimizer of torch.
        ValueError: An argument is invalid, as in save(), or `optimizer` is empty.
        RuntimeError: The interpreter is shutting down, and this is neither the main thread nor a
            callback.

    Exceptions of torch.save for objects that cannot be pickled are passed on.
    """
    if not isinstance(f, (str, os.PathLike)):
        raise TypeError(
            f"save_async() takes a path, not {type(f).__name__}; torch writes to file objects in "
            "the foreground: use save()"
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
    """Return the initial report of a save whose bytes torch itself writes."""
    return Report(
        path=path, written_by="torch", downgrades=(Downgrade(note, "torch"),), started_s=time.time()
    )


@dataclass
class _TorchSave:
    """An object to save, with torch.save's arguments."""

    obj: object
    pickle_module: Any
    protocol: int
    new_format: bool
    no_byteorder: bool
    request: SaveRequest

    # ---- Kinds of saves ---------------------------------------------------------------------

    def to_path(self, path: str) -> Report:
        """Save to a path and wait for it."""
        try:
            pickled, pickle_s = self._pickle(path)
        except pickling.Unsupported as reason:
            return self._by_torch(path, str(reason))
        # The owner waits here, so the object does not change and need not be copied. Data on a GPU
        # is fetched while the disk writes.
        route = self._route(pickled, path)
        return completed_over(
            route, lambda route: self._start(pickled, route, pickle_s, borrow=True)
        )

    def begin(
        self, path: str, is_steady: Callable[[torch.UntypedStorage], bool] | None = None
    ) -> SaveHandle:
        """Start a save in the background. Storages that is_steady() accepts are copied later."""
        try:
            pickled, pickle_s = self._pickle(path)
        except pickling.Unsupported as reason:
            # torch's own writer copies nothing and holds the GIL, so the save is complete when
            # begin() returns.
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
        """Let torch write to a file object.

        It has no path, so the save can neither replace nor sync it.
        """
        if is_ours(f):
            self._torch_save(f)  # the report of the AtomicFile describes the save
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
        """Let torch write into an AtomicFile, which is still atomic and durable."""
        past = directly(path, "its size is not known in advance" if self.request.tier else "")
        downgrades = (Downgrade(f"written by torch itself: {reason}", "torch"), *past.downgrades)
        with AtomicFile(path, self.request, written_by="torch", downgrades=downgrades) as file:
            self._torch_save(file)
        assert file.report is not None
        return file.report

    def _torch_save(self, f: IO[bytes]) -> None:
        original.save(
            self.obj, f, self.pickle_module, self.protocol, self.new_format, self.no_byteorder
        )

    # ---- Parts of a save --------------------------------------------------------------------

    def _pickle(self, path: str) -> tuple[pickling.Pickled, float]:
        if not self.new_format:
            raise pickling.Unsupported("the format from before torch 1.6 was requested")
        begin = time.perf_counter()
        pickling.check_arguments(path, self.pickle_module)
        pickled = pickling.collect(self.obj, self.pickle_module, self.protocol)
        return pickled, time.perf_counter() - begin

    def _route(self, pickled: pickling.Pickled, path: str) -> Route:
        records = pickled.records
        # The data of each record begins after a header, at most _MOST_PADDING behind the record
        # before.
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
