# SPDX-License-Identifier: Apache-2.0
"""From what C is given to a save under way."""

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


# Any deadline will do: a save with one does not wait for those before it to its file.
_INTERRUPTING_S = 3600.0


class Payload(NamedTuple):
    """What is to be saved, as C takes it."""

    #: structs, and how many
    array: Any
    length: int
    #: what must live as long as they are used
    keep: list[Any]
    #: functions that fetch bytes; what they raise the save raises
    couriers: list[Any]
    #: for each record, whether it may be copied after the call; None: none may
    later: Any = None
    #: what was not as preferred
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
    """Has begin(array, count, options, out) begin a save.

    Args:
        begin: the call of the library.
        context: which the save belongs to.
        route: where it goes.
        payload: what is saved.
        request: what the caller asked for.
        borrow: what is saved stays as it is until the save has ended.
        pickle_s: what it has taken so far, for the report.
        notes: what was not as preferred so far.
        owner: lives until the save is freed.
        causes: those who know more about a failure than its code.
    """
    interrupted = paths_staged()
    if interrupted:
        # This is a signal's handler, and until it returns the save that it has interrupted goes no
        # further. So this one waits neither for staging memory nor for its turn behind that one.
        borrow = True
        if request.due is None and place_of(route.place) in interrupted:
            request = replace(request, due=time.monotonic() + _INTERRUPTING_S)
    options = sized("ioshape_save_options")
    request.set_in(options)
    if route.passage is not None:
        options.sync = lib.IOSHAPE_ON  # what is drained later must be there then
    options.borrow = borrow
    teller = Teller.for_save(request.progress)
    tellers = [] if teller is None else [teller]
    # The rest is copied by the time the call returns.
    outlives = borrow or payload.later is not None
    keep_longer = [*payload.keep] if outlives else []
    keep_longer += [one.set_in(options, queue=True) for one in tellers]
    # Whenever a signal comes, a save that has begun is freed, which ends it, before what it
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
            handle._wait(None)  # what it borrows may change from here on
        return handle
    except BaseException:
        ffi.release(out)
        raise


def records_of(
    pickled: Pickled,
    is_steady: Callable[[torch.UntypedStorage], bool] | None = None,
    path: str = "",
) -> Payload:
    """The records of an object; storages of which is_steady() says so may be copied later.

    `path` is named where one of those changes before.
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
    """Has records fetched that lie on devices."""
    # Brings in torch, which saves of numpy's arrays do without.
    from ioshape._device.outgoing import FETCH, Fetched, couriers_for  # noqa: PLC0415

    couriers, notes = couriers_for(
        [Fetched(one.name, one.storage, is_later) for _to, one, is_later in fetched], path
    )
    for (to, _record, _later), courier in zip(fetched, couriers, strict=True):
        to.fetch = FETCH
        to.fetch_user = handle = ffi.new_handle(courier)
        keep += [handle, courier]
    return couriers, notes
