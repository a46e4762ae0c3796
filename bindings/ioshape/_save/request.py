# SPDX-License-Identifier: Apache-2.0
"""The request of a caller, and the start of every save.

A save takes three steps. The caller's arguments become a SaveRequest. The object becomes a Payload,
which is records in the form of C. start() passes both to the library and returns a SaveHandle.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ioshape._core import under_way
from ioshape._core.callbacks import Teller
from ioshape._core.config import is_durable, tier_folder
from ioshape._core.context import current
from ioshape._core.errors import last_failure
from ioshape._core.structs import called_from_c, owned, said, sized
from ioshape._load.pickled import names_of_records
from ioshape._native import ffi, lib
from ioshape._save.handle import SaveHandle

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from ioshape._core.context import Context
    from ioshape._core.report import Downgrade, Progress
    from ioshape._save.handle import Cause
    from ioshape._tier.route import Passage


# The value does not matter. A save with any deadline does not wait for earlier saves to its path.
_INTERRUPTING_S = 3600.0


def due_in(deadline: float | None) -> float | None:
    """Return the time.monotonic() at which a deadline in seconds from now ends; None for none."""
    return None if deadline is None else time.monotonic() + deadline


def left_ms(due: float | None) -> int:
    """Return the milliseconds left, for options of C: 0 for no deadline, -1 if it is over."""
    if due is None:
        return 0
    left = math.ceil((due - time.monotonic()) * 1000)
    return left if left > 0 else -1


@dataclass(frozen=True)
class SaveRequest:
    """The options of a caller, and the way that the save takes.

    Settings are read when it is made, and the deadline counts from then on.
    """

    #: the destination, as the caller has written it
    path: str
    #: the context of new saves when the request was made
    context: Context
    durable: bool
    replace: bool
    progress: Callable[[Progress], object] | None
    #: deadline by time.monotonic(); None: there is no deadline
    due: float | None
    #: folder of the tier; "": the save uses none
    tier: str
    #: whether the save ends only when the file is at the destination, and not on the tier
    to_destination: bool
    #: whether to write a checksum of each MiB into a file beside the saved file
    checksums: bool
    #: path that the save writes: the destination, or one on the tier
    write_path: str
    #: the rest of the way, if the save writes on the tier; None: there is none
    passage: Passage | None = None
    #: downgrades so far
    downgrades: tuple[Downgrade, ...] = ()

    @classmethod
    def of(
        cls,
        path: str,
        durable: bool | Literal["destination"] | None = None,
        replace: bool = True,
        progress: Callable[[Progress], object] | None = None,
        deadline: float | None = None,
        *,
        tier: str | os.PathLike[str] | Literal[False] | None = False,
        checksums: bool = False,
    ) -> SaveRequest:
        """Make a request of the arguments of a public call."""
        context = current()
        to_destination = durable == "destination"
        if durable == "destination":
            durable = True
        tier = context.tier if tier is None else tier
        return cls(
            path=path,
            context=context,
            durable=context.durable if durable is None else is_durable(durable),
            replace=replace,
            progress=progress,
            due=due_in(deadline),
            tier=tier_folder(tier) if tier else "",
            to_destination=to_destination,
            checksums=checksums,
            write_path=path,
        )

    def ordered_context(self) -> Context:
        """Return the context for the save. Saves to one path share one, which keeps their order."""
        return under_way.context_of_saves_to(self.write_path) or self.context

    def set_in(self, options: Any) -> None:
        """Set the fields that the option structs of records and of files have in common."""
        options.sync = lib.IOSHAPE_ON if self.durable else lib.IOSHAPE_OFF
        options.replace = lib.IOSHAPE_ON if self.replace else lib.IOSHAPE_OFF
        options.deadline_ms = left_ms(self.due)


@dataclass
class Payload:
    """Records or tensors to be saved, in the form that C takes."""

    #: array of C structs, and its length
    array: Any
    length: int
    #: objects that must live as long as C uses the array
    keep: list[Any]
    #: functions that fetch bytes from devices; the save raises what they raise
    couriers: list[Any] = field(default_factory=list)
    #: array with a 1 for each record that may be copied after the call; NULL: no record may
    later: Any = ffi.NULL
    #: fields of the option struct of C that belong to the payload
    options: dict[str, Any] = field(default_factory=dict)
    #: the pickle, which has the names of the tensors
    pickle: bytes = b""
    #: seconds of pickling, for the report
    pickle_s: float = 0.0
    #: downgrades that the payload causes
    downgrades: tuple[Downgrade, ...] = ()


def _leave_unnamed(
    _kind: type[BaseException] | None,
    _value: BaseException | None,
    _traceback: TracebackType | None,
) -> None:
    """Let the alarm name the record: the pickle may have what only torch can read."""


@called_from_c(onerror=_leave_unnamed)
def ioshape_py_tensor_name(pickle: bytes, record: Any, into: Any, size: int) -> None:
    """Write the name of the tensor in a record, because the save raises an alarm."""
    name = names_of_records(pickle).get(said(record), "").encode(errors="replace")[: size - 1]
    ffi.memmove(into, name + b"\0", len(name) + 1)


def start(
    request: SaveRequest,
    context: Context,
    payload: Payload,
    function: Callable[..., int],
    *arguments: Any,
    background: bool,
    owner: object = None,
    causes: Iterable[Cause] = (),
) -> SaveHandle:
    """Start a save by a function of the library, and return its handle.

    Args:
        request: The options of the caller.
        context: The context that the save belongs to.
        payload: The records to save.
        function: The function, which also gets the options and the pointer for its result.
        arguments: Its first arguments.
        background: Whether the caller goes on while the save is in progress. If so, the records are
            copied, except those that may be copied later. If not, their memory stays unchanged.
        owner: An object that must live until the save is freed.
        causes: Objects that know more about a failure than its code.
    """
    # A save in a signal handler may have interrupted others, which make no progress until it
    # returns. So it must not wait for staging memory, nor for an interrupted save to its path.
    interrupted = under_way.paths_staged()
    borrow = not background or bool(interrupted)
    if (
        interrupted
        and request.due is None
        and under_way.canonical(request.write_path) in interrupted
    ):
        request = replace(request, due=time.monotonic() + _INTERRUPTING_S)
    with under_way.starting():
        options = sized("ioshape_save_options")
        request.set_in(options)
        options.borrow = borrow
        for name, value in payload.options.items():
            setattr(options, name, value)
        # Without borrowing and late copies, all records are copied when the call returns.
        outlives = borrow or payload.later != ffi.NULL
        keep = list(payload.keep) if outlives else []
        failures = list(payload.couriers) if outlives else []
        # If nothing is copied here, C calls Python only for the caller's own callback.
        teller = Teller.for_save(request.progress) if request.progress or not borrow else None
        if teller is not None:
            keep.append(teller.set_in(options, queue=True))
            failures.append(teller)
        if payload.pickle:
            options.tensor_name = lib.ioshape_py_tensor_name
            options.tensor_name_user = pickle = ffi.new_handle(payload.pickle)
            keep.append(pickle)
        out = owned("save", context, owner)
        if request.passage is not None:
            request.passage.save = out
        # If a signal raises an exception, the save is freed, which aborts it, before the memory
        # that it borrows.
        try:
            with contextlib.nullcontext() if borrow else under_way.staging(request.write_path):
                code = function(*arguments, options, out)
            if code:
                raise _failure(request.path, [*payload.couriers, *failures])
            handle = SaveHandle(
                request,
                out,
                context,
                pickle_s=payload.pickle_s,
                keep=keep,
                failures=failures,
                downgrades=payload.downgrades,
                causes=causes,
            )
            if interrupted:
                handle._wait(None)  # the borrowed memory may change when the handler returns
        except BaseException:
            ffi.release(out)
            raise
        under_way.register(handle, background=background)
    if background and request.passage is not None:
        handle._watch()  # a thread must add the file to the tier's journal when the save ends
    return handle


def _failure(path: str, sources: Iterable[Any]) -> BaseException:
    """Return the exception of a callback that ended a save, or else the library's last failure."""
    met = (source.failure for source in sources)
    return next((one for one in met if one is not None), None) or last_failure(path, "save")
