# SPDX-License-Identifier: Apache-2.0
"""Keep the function of the package safetensors that ioshape replaces, as it was before."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import safetensors
except ImportError as error:
    raise ImportError(
        "ioshape.safetensors needs the package safetensors, which is not installed; install it: "
        'pip install "safetensors>=0.5"'
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

serialize_file: Callable[..., None] | None = getattr(safetensors, "serialize_file", None)

if serialize_file is None:
    raise ImportError(
        "this version of safetensors has no serialize_file(), which ioshape needs; install "
        'another: pip install "safetensors>=0.5"'
    )
