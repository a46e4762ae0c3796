# SPDX-License-Identifier: Apache-2.0
"""The start of a save: from a Payload for C to a SaveHandle."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.callbacks import Teller
from ioshape._core.errors import last_failure
from ioshape._core.structs import owned, sized
from ioshape._core.under_way import paths_staged, place_of, staging
from ioshape._native import ffi, lib
from ioshape._save.handle import SaveHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from ioshape._core.context import Context
    from ioshape._save.handle import Cause
    from ioshape._save.pickling import Pickled
    from ioshape._save.request import SaveRequest
    from ioshape._tier.route import Route


# The value does not matter. A save with any deadline does not wait for earlier saves to its path.
_INTERRUPTING_S = 3600.0


class Payload(NamedTuple):
    """Records to be saved, in the form that C takes."""

    #: array of C structs, and its length
    array: Any
    length: int
    #: objects that must live as long as C uses the array
    keep: list[Any]
    #: functions that fetch bytes from devices; the save raises what they raise
    couriers: list[Any]
    #: for each record, whether it may be copied after the call; None: no record may
    later: Any = None
    #: sentences that describe downgrades
    notes: tuple[str, ...] = ()


def start(
    begin: Callable[[Any, int, Any, Any], int],
    context: Context,
    route: Route,
    payload: Payload,
    request: SaveRequest,
    *,
    borrow: bool,
    pickle_s: float = 0.0,
    notes: tuple[str, ...] = (),
    owner: object = None,
    causes: Iterable[Cause] = (),
) -> SaveHandle:
    """Start a save by calling begin(array, count, options, out). Return its handle.

    Args:
        begin: The library function to call. It returns 0 or a negative code.
        context: The context that the save belongs to.
        route: The destination, and the tier on the way to it.
        payload: The records to save.
        request: The options of the caller.
        borrow: Whether the memory of the records stays unchanged until the save has ended. If so,
            nothing is copied.
        pickle_s: Seconds of pickling, for the report.
        notes: Downgrades so far, for the report.
        owner: An object that must live until the save is freed.
        causes: Objects that know more about a failure than its code.
    """
    interrupted = paths_staged()
    if interrupted:
        # This is a signal handler, and the interrupted save makes no progress until it returns. So
        # this save must not wait for staging memory, nor for the interrupted save to the same path.
        borrow = True
        if request.due is None and place_of(route.place) in interrupted:
            request = replace(request, due=time.monotonic() + _INTERRUPTING_S)
    options = sized("ioshape_save_options")
    request.set_in(options)
    if route.passage is not None:
        options.sync = lib.IOSHAPE_ON  # the file must survive on the tier until it is drained
    options.borrow = borrow
    teller = Teller.for_save(request.progress)
    tellers = [] if teller is None else [teller]
    # Without borrowing and late copies, all records are copied when the call returns.
    outlives = borrow or payload.later is not None
    keep_longer = [*payload.keep] if outlives else []
    keep_longer += [one.set_in(options, queue=True) for one in tellers]
    # If a signal raises an exception, the save is freed, which aborts it, before the memory that it
    # borrows.
    out = owned("save", context, owner)
    try:
        with contextlib.nullcontext() if borrow else staging(route.place):
            code = begin(payload.array, payload.length, options, out)
        if code:
            for source in (*payload.couriers, *tellers):
                if source.failure is not None:
                    raise source.failure
            raise last_failure(route.path, "save")
        handle = SaveHandle(
            out,
            context,
            route,
            pickle_s=pickle_s,
            keep=keep_longer,
            failures=(*(payload.couriers if outlives else ()), *tellers),
            notes=(*notes, *payload.notes),
            causes=causes,
        )
        if interrupted:
            handle._wait(None)  # the borrowed memory may change when the handler returns
        return handle
    except BaseException:
        ffi.release(out)
        raise


def records_of(
    pickled: Pickled,
    is_steady: Callable[[torch.UntypedStorage], bool] | None = None,
    path: str = "",
) -> Payload:
    """Return the records of an object for C.

    Storages for which is_steady() returns True may be copied after the call. `path` appears in the
    error message if such a storage changes too early.
    """
    records = ffi.new("struct ioshape_record[]", len(pickled.records))
    keep: list[Any] = [records]
    fetched: list[tuple[Any, Any, bool]] = []
    later = [
        is_steady is not None and record.storage is not None and is_steady(record.storage)
        for record in pickled.records
    ]
    for record, to, is_later in zip(pickled.records, records, later, strict=True):
        to.name = name = ffi.new("char[]", record.name.encode())
        keep.append(name)
        to.bytes = record.n_bytes
        to.alignment = record.alignment
        if not record.n_bytes:
            continue
        if record.storage is None:
            to.data = data = ffi.from_buffer(record.data)
            keep.append(data)
        elif pickled.has_device_storages and record.storage.device.type != "cpu":
            fetched.append((to, record, is_later))
        else:
            to.data = ffi.cast("void *", record.storage.data_ptr())
            keep.append(record.storage)
    couriers, notes = _fetch(fetched, path, keep) if fetched else ([], ())
    flags = ffi.new("uint8_t[]", later) if any(later) else None
    return Payload(records, len(pickled.records), keep, couriers, flags, notes)


def _fetch(
    fetched: list[tuple[Any, Any, bool]], path: str, keep: list[Any]
) -> tuple[list[Any], tuple[str, ...]]:
    """Let C fetch the records that lie on devices. Return the couriers and their notes.

    `keep` receives the objects that must live as long as C may call.
    """
    # Imports torch. Saves of numpy arrays work without it.
    from ioshape._device.outgoing import FETCH, Fetched, couriers_for  # noqa: PLC0415

    couriers, notes = couriers_for(
        [Fetched(one.name, one.storage, is_later) for _to, one, is_later in fetched], path
    )
    for (to, _record, _later), courier in zip(fetched, couriers, strict=True):
        to.fetch = FETCH
        to.fetch_user = handle = ffi.new_handle(courier)
        keep += [handle, courier]
    return couriers, notes
