# SPDX-License-Identifier: Apache-2.0
"""Helpers between Python and C: structs, strings, ownership, and functions that C calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def sized(name: str) -> Any:
    """Return a new struct of this name, zeroed, with its field `size` set."""
    struct = ffi.new(f"struct {name} *")
    struct.size = ffi.sizeof(f"struct {name}")
    return struct


def said(text: Any) -> str:
    """Return a C string of the library as str; "" for NULL."""
    return str(ffi.string(text).decode(errors="replace")) if text else ""


def enum_names(prefix: str) -> dict[int, str]:
    """Return the names behind a prefix of the constants of a C enum, in lower case, by number."""
    names = (name for name in dir(lib) if name.startswith(prefix))
    found = {int(getattr(lib, name)): name.removeprefix(prefix).lower() for name in names}
    return dict(sorted(found.items()))


def shared_fields(
    cls: Any,
    struct: Any,
    *,
    flags: frozenset[str] = frozenset(),
    text: Callable[[Any], str] = said,
) -> dict[str, Any]:
    """Return the fields that a class of values and a C struct have in common, by name.

    `n_bytes` is named `bytes` in C. A number whose name is in `flags` is read as a bool.

    Args:
        cls: A data class or a named tuple.
        struct: The struct, or a pointer to it.
        flags: Names of fields.
        text: Converts a string of C.
    """
    names = set(getattr(cls, "_fields", None) or (field.name for field in fields(cls)))
    kind = ffi.typeof(struct)
    found: dict[str, Any] = {}
    for in_c, member in (kind.item if kind.kind == "pointer" else kind).fields:
        name = "n_bytes" if in_c == "bytes" and "n_bytes" in names else in_c
        if name not in names:
            continue
        value = getattr(struct, in_c)
        if member.type.kind in ("array", "pointer") and member.type.item.cname == "char":
            found[name] = text(value)
        else:
            found[name] = bool(value) if name in flags else value
    return found


def path_said(text: Any) -> str:
    """Return a C string that is a path, which need not be valid in any encoding."""
    return os.fsdecode(ffi.string(text))


# ---- Ownership ----------------------------------------------------------------------------------


def owned(name: str, *keep: object) -> Any:
    """Return a NULL pointer to struct `name`, through which C returns a new object.

    When the pointer is garbage-collected, C frees the object, and only then are the objects in
    `keep` released. The pointer has an owner before C sets it, so a signal at any moment leaks
    nothing.
    """
    free = getattr(lib, f"ioshape_py_free_{name}")
    return ffi.gc(ffi.new(ffi.typeof(free).args[1]), partial(free, ffi.new_handle(keep)))


_Owner = TypeVar("_Owner", bound="Owner")


class Owner:
    """Base class of objects that own a C struct. The end of a `with` block closes them.

    After close(), a use of the struct raises ValueError instead of crashing.
    """

    def __init__(self, name: str, path: str, *keep: object) -> None:
        self._out: Any = owned(name, *keep)
        self._about = path

    @property
    def _pointer(self) -> Any:
        if self._out is None:
            raise ValueError(f'cannot use "{self._about}": it is closed; open it again')
        return self._out[0]

    def __enter__(self: _Owner) -> _Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the struct. Further calls have no effect."""
        out, self._out = self._out, None
        if out is not None:
            ffi.release(out)


# ---- Functions that C calls ---------------------------------------------------------------------

# Exit handlers run in reverse order. This one is registered early, so it runs after the wait for
# saves and other handlers that may log.
atexit.register(lib.ioshape_py_end_log)

# Private names of `threading`. In a Python without them, entries of foreign threads stay.
_known: dict[int, Any] = getattr(threading, "_active", {})
_lock: contextlib.AbstractContextManager[Any] = getattr(
    threading, "_active_limbo_lock", contextlib.nullcontext()
)


@contextlib.contextmanager
def visiting() -> Iterator[None]:
    """Remove the entry of the current thread from `threading` if the block made it.

    Code that asks for the current thread, such as logging, makes an entry for a thread that Python
    did not start. `threading` would keep that entry for ever, though the thread is one of C's.
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
    """Decorate a function as the implementation of the C function of its name in callbacks.h.

    The function gets the object behind the handle `user`. If it raises, `onerror` is called, and C
    gets `error` as the result.
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
    """Keep an exception in the `failure` of the object that C called.

    C stops its work because of the error code. The Python code that called C then raises `failure`.
    The exception may also come from before the function's first line, as a Ctrl-C does.
    """
    user = traceback.tb_frame.f_locals.get("user") if traceback is not None else None
    if kind is not None and user is not None:
        ffi.from_handle(user).failure = value
