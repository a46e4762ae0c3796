# SPDX-License-Identifier: Apache-2.0
"""Names of tensors for the alarms of a save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ioshape._core.structs import called_from_c, said
from ioshape._load.pickled import names_of_records
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from types import TracebackType


class Namer:
    """Adapter that C asks for the name of the tensor in a record, if the save raises an alarm."""

    def __init__(self, pickle: bytes) -> None:
        self._pickle = pickle

    def set_in(self, options: Any) -> Any:
        """Set the callback in an option struct and return the handle that C passes back.

        The caller must keep the handle alive until the save has ended.
        """
        handle = ffi.new_handle(self)
        options.tensor_name = lib.ioshape_py_tensor_name
        options.tensor_name_user = handle
        return handle

    def name(self, record: str) -> str:
        """Return the name of the tensor in a record; "" if it is unknown."""
        return names_of_records(self._pickle).get(record, "")


def _leave_unnamed(
    _kind: type[BaseException] | None,
    _value: BaseException | None,
    _traceback: TracebackType | None,
) -> None:
    """Let the alarm name the record: the pickle may have what only torch can read."""


@called_from_c(onerror=_leave_unnamed)
def ioshape_py_tensor_name(namer: Namer, record: Any, into: Any, size: int) -> None:
    name = namer.name(said(record)).encode(errors="replace")[: size - 1]
    ffi.memmove(into, name + b"\0", len(name) + 1)
