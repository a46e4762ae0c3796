# SPDX-License-Identifier: Apache-2.0
"""Memory that background saves copy to, kept from one to the next."""

from __future__ import annotations

from ioshape._core.context import current, current_if_any
from ioshape._core.errors import last_failure
from ioshape._native import lib

__all__ = ["reserve", "trim"]


def reserve(n_bytes: int) -> None:
    """Makes the memory for background saves of so many bytes now.

    The first save in the background is then as quick as later ones.
    """
    context = current()
    code = lib.save_reserve(context.pointer, n_bytes)
    if code:
        raise last_failure("", "reserve")


def trim() -> None:
    """Gives memory that is kept for the next save back to the system."""
    context = current_if_any()
    if context is not None:
        lib.save_reserve(context.pointer, 0)
