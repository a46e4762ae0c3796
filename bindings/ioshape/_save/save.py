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
from ioshape._core.context import current, encoded
from ioshape._core.descriptors import is_pythons
from ioshape._core.errors import StorageError
from ioshape._core.report import Downgrade, Report
from ioshape._core.under_way import raise_unheard, register
from ioshape._native import lib
from ioshape._save import lazy as lazily
from ioshape._save import pickling, retention
from ioshape._save.atomic import AtomicFile
from ioshape._save.handle import SaveHandle
from ioshape._save.request import SaveRequest, start
from ioshape._tier.route import after_failure, directly, passages, routed

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Literal

    import torch

    from ioshape._core.report import Progress

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


def _path_of(f: Any) -> str | None:
    """Return the path that save() writes; None if torch writes to a file object."""
    if isinstance(f, (str, os.PathLike)):
        return os.fspath(f)
    if hasattr(f, "write"):
        return None
    raise _NoTargetError(
        f"save() takes a path or a file object with write(), not {type(f).__name__}"
    )


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
    path = _path_of(f)
    if keep_last is not None:
        retention.check(path, keep_last)
    request = SaveRequest.of(path or "", durable, replace, progress, deadline, tier=tier)
    save = _TorchSave(
        obj,
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
    )
    report = save.to_file_object(f) if path is None else save.to_path(request)
    if keep_last is not None:
        retention.after_save(report, keep_last)
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
    path = os.fspath(f)
    if keep_last is not None:
        retention.check(path, keep_last)
    request = SaveRequest.of(path, durable, replace, progress, deadline, tier=tier)
    save = _TorchSave(
        obj,
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
    )
    if optimizer is None and not lazy:
        handle = save.begin(request)
    else:
        waiters = lazily.waiters_of(optimizer)
        handle = save.begin(request, lazily.steady(optimizer))
        lazily.watch(handle, waiters)
    if keep_last is not None:
        handle.add_done_callback(lambda handle: _remove_older(handle, keep_last))
    raise_unheard(but=handle)
    return handle


def _remove_older(handle: SaveHandle, keep_last: int) -> None:
    """Remove older files after a background save."""
    if handle._error is None and handle._report is not None:
        retention.after_save(handle._report, keep_last)


@dataclass
class _TorchSave:
    """An object to save, with torch.save's arguments."""

    obj: object
    pickle_module: Any
    protocol: int
    new_format: bool
    no_byteorder: bool

    # ---- Kinds of saves ---------------------------------------------------------------------

    def to_path(self, request: SaveRequest) -> Report:
        """Save to a path and wait for it."""
        try:
            pickled = self._pickle(request.path)
        except pickling.Unsupported as reason:
            return self._by_torch(request, str(reason))
        # The owner waits here, so the object does not change and need not be copied. Data on a GPU
        # is fetched while the disk writes.
        chosen = _on_its_way(request, pickled)
        try:
            return _start(pickled, chosen, background=False)._complete()
        except StorageError as error:
            direct = after_failure(request, chosen, error)
        return _start(pickled, direct, background=False)._complete()

    def begin(
        self,
        request: SaveRequest,
        is_steady: Callable[[torch.UntypedStorage], bool] | None = None,
    ) -> SaveHandle:
        """Start a save in the background. Storages that is_steady() accepts are copied later."""
        try:
            pickled = self._pickle(request.path)
        except pickling.Unsupported as reason:
            # torch's own writer copies nothing and holds the GIL, so the save is complete when
            # begin() returns.
            try:
                report = self._by_torch(request, f"{reason}; not in the background")
            except StorageError as error:
                handle = SaveHandle.ended(request, None, error)
            else:
                handle = SaveHandle.ended(request, report, None)
            register(handle, background=True)
            return handle
        return _start(pickled, _on_its_way(request, pickled), is_steady, background=True)

    def to_file_object(self, f: Any) -> Report:
        """Let torch write to a file object.

        It has no path, so the save can neither replace nor sync it.
        """
        if is_ours(f):
            self._torch_save(f)  # the report of the AtomicFile describes the save
            return Report(str(f.raw.name), written_by="torch")
        why = "torch wrote to the file object itself: neither atomic nor durable"
        report = Report(
            path=str(_attribute(f, "name") or ""),
            written_by="torch",
            downgrades=(Downgrade(why, "torch"),),
            started_s=time.time(),
        )
        begin, folder = time.perf_counter(), current().trace
        try:
            self._torch_save(f)
        except (OSError, RuntimeError) as error:  # torch's writer raises both
            trace.record(folder, replace(report, total_s=time.perf_counter() - begin), error=error)
            raise
        report = replace(report, total_s=time.perf_counter() - begin)
        trace.record(folder, report)
        return report

    def _by_torch(self, request: SaveRequest, reason: str) -> Report:
        """Let torch write into an AtomicFile, which is still atomic and durable."""
        why = Downgrade(f"written by torch itself: {reason}", "torch")
        request = replace(request, downgrades=(*request.downgrades, why))
        if request.tier:
            request = directly(request, "its size is not known in advance")
        with AtomicFile(request, written_by="torch") as file:
            self._torch_save(file)
        assert file.report is not None
        return file.report

    def _torch_save(self, f: IO[bytes]) -> None:
        original.save(
            self.obj, f, self.pickle_module, self.protocol, self.new_format, self.no_byteorder
        )

    def _pickle(self, path: str) -> pickling.Pickled:
        if not self.new_format:
            raise pickling.Unsupported("the format from before torch 1.6 was requested")
        pickling.check_arguments(path, self.pickle_module)
        return pickling.collect(self.obj, self.pickle_module, self.protocol)


# ---- Steps of a save ----------------------------------------------------------------------------


def _on_its_way(request: SaveRequest, pickled: pickling.Pickled) -> SaveRequest:
    """Return the request with the way of the save: over the tier, or directly."""
    if not request.tier and not passages:
        return request
    # The data of each record begins after a header, at most _MOST_PADDING behind the record before.
    return routed(request, pickled.n_bytes + (len(pickled.records) + 1) * _MOST_PADDING)


def _start(
    pickled: pickling.Pickled,
    request: SaveRequest,
    is_steady: Callable[[torch.UntypedStorage], bool] | None = None,
    *,
    background: bool,
) -> SaveHandle:
    context = request.ordered_context()
    payload = pickling.records_of(
        pickled, is_steady, request.write_path, copies_shared=not background
    )
    return start(
        request,
        context,
        payload,
        lib.save_records_lazily,
        context.pointer,
        encoded(request.write_path),
        payload.array,
        payload.later,
        payload.length,
        background=background,
    )
