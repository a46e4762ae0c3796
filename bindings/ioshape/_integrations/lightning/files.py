# SPDX-License-Identifier: Apache-2.0
"""Decide which Lightning checkpoints ioshape handles, and save and load these."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ioshape._load.load import load as our_load

if TYPE_CHECKING:
    from collections.abc import Callable


def local_path(path: Any) -> str | None:
    """Return the path of a checkpoint on a mounted filesystem; None for other URLs."""
    # fsspec is a dependency of Lightning; ioshape needs it only here.
    core = import_module("fsspec.core")
    local = import_module("fsspec.implementations.local")
    filesystem, inner = core.url_to_fs(str(path))
    return str(inner) if isinstance(filesystem, local.LocalFileSystem) else None


def save(
    by_lightning: Callable[..., None],
    ours: Callable[[Any, str], object],
    checkpoint: Any,
    path: Any,
    storage_options: Any,
) -> None:
    """Save a checkpoint with `ours`; create its directory. Leave URLs to `by_lightning`."""
    local = local_path(path) if storage_options is None else None
    if local is None:
        by_lightning(checkpoint, path, storage_options)
        return
    os.makedirs(os.path.dirname(local), exist_ok=True)  # noqa: PTH103, PTH120
    ours(checkpoint, local)


def load(
    by_lightning: Callable[..., Any], path: Any, map_location: Any, weights_only: bool | None
) -> Any:
    """Load and verify a checkpoint. Leave URLs to `by_lightning`."""
    local = local_path(path)
    if local is None:
        return by_lightning(path, map_location, weights_only)
    return our_load(local, map_location, weights_only=weights_only)


def as_it_was(storage: Any, _location: str) -> Any:
    """Return a storage unchanged: the default of Lightning's map_location."""
    return storage
