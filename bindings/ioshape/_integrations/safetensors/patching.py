# SPDX-License-Identifier: Apache-2.0
"""The package safetensors writes its files through us.

Nothing is imported here before the first save but the package itself: "ioshape run" does this in
every process that imports it, and those without torch stay without.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ioshape._core.locks import ForkedLock
from ioshape._core.replacing import replace
from ioshape._integrations.safetensors import original
from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from types import ModuleType


@functools.wraps(original.serialize_file)  # type: ignore[arg-type] # original.py has seen to it
def _serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
    from ioshape._integrations.safetensors.funnel import serialize_file  # noqa: PLC0415

    serialize_file(tensor_dict, filename, metadata)


_lock = ForkedLock()
_in_force = 0


def is_in_force() -> bool:
    """Whether it writes through us."""
    return _in_force > 0


def patch(*, load: bool = True) -> None:  # noqa: ARG001 - it replaces nothing that loads
    """From now on serialize_file() is ours, in all modules that have it already, too."""
    global _in_force  # noqa: PLW0603
    with _lock:
        _in_force += 1
        replace([(original.serialize_file, _serialize_file)])


def unpatch() -> None:
    """Undoes the last patch()."""
    global _in_force  # noqa: PLW0603
    with _lock:
        _in_force -= 1
        if not _in_force:
            replace([(_serialize_file, original.serialize_file)])


def follow(_module: ModuleType, *, load: bool) -> None:
    """What "ioshape run" calls when the package safetensors has been imported."""
    # Not by ioshape.patch(): that needs torch, and a program may do without.
    if is_tested("safetensors"):
        patch(load=load)
