# SPDX-License-Identifier: Apache-2.0
"""What is used of the package safetensors, as it was before anybody patched it."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

try:
    import safetensors
except ImportError as error:
    raise ImportError(
        "ioshape.safetensors needs the package safetensors, which is not installed; install it: "
        'pip install "safetensors>=0.5"'
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

serialize_file: Callable[..., None] | None = getattr(safetensors, "serialize_file", None)

if serialize_file is None:
    raise ImportError(
        "this version of safetensors has no serialize_file(), through which ioshape saves; install "
        'another: pip install "safetensors>=0.5"'
    )


def with_ours(function: Any, module: ModuleType, **ours: Any) -> Any:
    """A function of the package that calls ours instead of what it calls by these names.

    So its checks are its own, whatever the version has, and nothing is replaced for anybody else.
    """
    missing = set(ours) - set(function.__code__.co_names)
    if missing:
        raise ImportError(
            f"{module.__name__}.{function.__name__}() of this version does not call "
            f"{', '.join(sorted(missing))}(), through which ioshape works; install another version "
            "of safetensors"
        )
    made = FunctionType(
        function.__code__,
        {**vars(module), **ours},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
