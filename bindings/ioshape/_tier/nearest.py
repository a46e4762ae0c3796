# SPDX-License-Identifier: Apache-2.0
"""Load from the nearest copy: the one on this node's tier, unless the destination is newer."""

from __future__ import annotations

import glob
from typing import TYPE_CHECKING, TypeVar

from ioshape._core.errors import PassedOver, StorageError, is_our_fault, warn_passed_over
from ioshape._core.under_way import canonical
from ioshape._tier.drain import drain_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._tier.tier import Tier

_T = TypeVar("_T")


def tier_at(folder: str) -> Tier | None:
    """Return the tier of a folder; None without a folder, or if the tier cannot be used."""
    if not folder:
        return None
    try:
        return drain_of(folder).tier
    except StorageError:
        return None


def check_tier(folder: str) -> None:
    """Raise if a tier cannot be read: an unreadable tier must not count as an empty one."""
    if not folder:
        return
    try:
        _ = drain_of(folder).tier
    except StorageError as error:
        if is_our_fault(error):
            raise


def nearest(path: str, folder: str, read: Callable[[str], _T]) -> _T:
    """Return what read() returns for the copy on the tier, or for the destination without one.

    If the copy is damaged, a FallbackWarning says so, and the destination is read.
    """
    tier = tier_at(folder)
    copy_path = None if tier is None else _found(tier, path)
    if copy_path is None:
        return read(path)
    try:
        return read(copy_path)
    except StorageError as error:
        if is_our_fault(error):
            raise
        passed_over = PassedOver(copy_path, error)
    try:
        found = read(path)
    except FileNotFoundError:
        raise passed_over.error from None
    if not isinstance(passed_over.error, FileNotFoundError):  # else drained meanwhile
        warn_passed_over(path, [passed_over])
    return found


def matching(pattern: str, folder: str) -> dict[str, str]:
    """Return the copies on the tier whose destinations match and are not newer, by destination."""
    tier = tier_at(folder)
    if tier is None:
        return {}
    behind = glob.escape(tier.files) + canonical(pattern)
    paths = [copy_path.removeprefix(tier.files) for copy_path in glob.glob(behind)]  # noqa: PTH207
    found = ((path, _found(tier, path)) for path in paths)
    return {path: copy_path for path, copy_path in found if copy_path is not None}


def _found(tier: Tier, path: str) -> str | None:
    try:
        return tier.find(path)
    except StorageError:  # no copy of this path, or the tier has changed
        return None
