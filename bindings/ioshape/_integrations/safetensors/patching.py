# SPDX-License-Identifier: Apache-2.0
"""Make the package safetensors write its files through ioshape.

Before the first save, this imports nothing but the package itself. "ioshape run" calls it in each
process that imports safetensors, and processes without torch must stay without it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ioshape._core.locks import module_lock
from ioshape._core.replacing import replace
from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

try:
    import safetensors
except ImportError as error:
    raise ImportError(
        "ioshape.safetensors needs the package safetensors, which is not installed; install it: "
        'pip install "safetensors>=0.5"'
    ) from error

if not hasattr(safetensors, "serialize_file"):
    raise ImportError(
        "this version of safetensors has no serialize_file(), which ioshape needs; install "
        'another: pip install "safetensors>=0.5"'
    )

#: the function of the package, as it was before
by_safetensors: Callable[..., None] = safetensors.serialize_file


@functools.wraps(by_safetensors)
def _serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
    from ioshape._integrations.safetensors.funnel import serialize_file  # noqa: PLC0415

    serialize_file(tensor_dict, filename, metadata)


_lock = module_lock()
_in_force = 0


def is_in_force() -> bool:
    """Return whether safetensors writes through ioshape."""
    return _in_force > 0


def patch(*, load: bool = True) -> None:  # noqa: ARG001 - it replaces nothing that loads
    """Replace serialize_file(), also in modules that have imported it already."""
    global _in_force  # noqa: PLW0603
    with _lock:
        _in_force += 1
        replace([(by_safetensors, _serialize_file)])


def unpatch() -> None:
    """Undo the last patch()."""
    global _in_force  # noqa: PLW0603
    with _lock:
        _in_force -= 1
        if not _in_force:
            replace([(_serialize_file, by_safetensors)])


def follow(_module: ModuleType, *, load: bool) -> None:
    """Patch safetensors. "ioshape run" calls this when the package has been imported."""
    # ioshape.patch() is not called, because that needs torch, which a program may do without.
    if is_tested("safetensors"):
        patch(load=load)
