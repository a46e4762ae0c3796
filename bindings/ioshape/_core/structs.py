# SPDX-License-Identifier: Apache-2.0
"""Between Python and C: structs, strings, ownership, and functions that C calls."""

from __future__ import annotations

import atexit
import contextlib
import threading
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import DataclassInstance


def sized(name: str) -> Any:
    """A struct of this name, with its size."""
    struct = ffi.new(f"struct {name} *")
    struct.size = ffi.sizeof(f"struct {name}")
    return struct


def said(text: Any) -> str:
    """A string of the library's."""
    return str(ffi.string(text).decode(errors="replace")) if text else ""


def shared_fields(
    cls: type[DataclassInstance], struct: Any, *, flags: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Read the fields that a dataclass and a struct have in common, by the types of C.

    A char array is read as a text. A number in `flags` is read as yes or no.
    """
    names = {field.name for field in fields(cls)}
    found: dict[str, Any] = {}
    for name, member in ffi.typeof(struct).item.fields:
        if name not in names:
            continue
        value = getattr(struct, name)
        if member.type.kind == "array" and member.type.item.cname == "char":
            found[name] = said(value)
        else:
            found[name] = bool(value) if name in flags else value
    return found


# ---- Ownership ----------------------------------------------------------------------------------


def owned(name: str, *keep: object) -> Any:
    """Where C puts a pointer to such a struct. When it goes, that is freed, and then `keep` goes.

    So it is owned before there is anything to own, whenever a signal comes.
    """
    free = getattr(lib, f"ioshape_py_free_{name}")
    return ffi.gc(ffi.new(ffi.typeof(free).args[1]), partial(free, ffi.new_handle(keep)))


class Owner:
    """Of such a struct. Once it has let go, asking for the struct is an error, and not a crash."""

    def __init__(self, name: str, path: str, *keep: object) -> None:
        self._out: Any = owned(name, *keep)
        self._about = path

    @property
    def _pointer(self) -> Any:
        if self._out is None:
            raise ValueError(f'cannot use "{self._about}": it is closed; open it again')
        return self._out[0]

    def _let_go(self) -> None:
        """A second call does nothing."""
        out, self._out = self._out, None
        if out is not None:
            ffi.release(out)


# ---- Functions that C calls ---------------------------------------------------------------------

# Nearly the last that the process does: what is registered later may log, as the wait for saves.
atexit.register(lib.ioshape_py_end_log)

# As private as they are: without them all is as if nobody tidied up.
_known: dict[int, Any] = getattr(threading, "_active", {})
_lock: contextlib.AbstractContextManager[Any] = getattr(
    threading, "_active_limbo_lock", contextlib.nullcontext()
)


@contextlib.contextmanager
def visiting() -> Iterator[None]:
    """Around what asks for the current thread, as logging does.

    A thread that is not Python's is kept in `threading` for ever then, with a name of its own. This
    one is gone when it returns to C.
    """
    thread = threading.get_ident()
    was_known = thread in _known
    try:
        yield
    finally:
        if not was_known:
            with _lock:
                _known.pop(thread, None)


def called_from_c(
    *, error: int | None = None, onerror: Callable[[Any, Any, Any], None]
) -> Callable[[Callable[..., Any]], None]:
    """Gives C the function of this name in callbacks.h. It gets the object of the handle `user`.

    `error` is what C gets where it raises, after `onerror` has been called.
    """

    def define(function: Callable[..., Any]) -> None:
        def called(user: Any, *arguments: Any) -> Any:
            with visiting():
                return function(ffi.from_handle(user) if user else None, *arguments)

        def failed(kind: Any, value: Any, traceback: Any) -> None:
            with visiting():
                onerror(kind, value, traceback)

        ffi.def_extern(name=function.__name__, error=error, onerror=failed)(called)

    return define


def keep_failure(kind: Any, value: Any, traceback: Any) -> None:
    """An exception stops what C does, and is raised where that was asked for.

    It may also come from before the function's first line: Ctrl-C.
    """
    user = traceback.tb_frame.f_locals.get("user") if traceback is not None else None
    if kind is not None and user is not None:
        ffi.from_handle(user).failure = value
