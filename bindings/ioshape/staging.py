# SPDX-License-Identifier: Apache-2.0
"""Staging memory: background saves copy tensors to it, and it is kept from save to save."""

from __future__ import annotations

from ioshape._core import context
from ioshape._core.errors import last_failure
from ioshape._native import lib

__all__ = ["reserve", "trim"]


def reserve(n_bytes: int) -> None:
    """Allocate staging memory for background saves of `n_bytes` now.

    The first background save is then as fast as later ones.
    """
    code = lib.save_reserve(context.current().pointer, n_bytes)
    if code:
        raise last_failure("", "reserve")


def trim() -> None:
    """Return the staging memory that is kept for the next save to the system."""
    made = context.live
    if made is not None:
        lib.save_reserve(made.pointer, 0)
