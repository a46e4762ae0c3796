# SPDX-License-Identifier: Apache-2.0
"""Make Lightning's TorchCheckpointIO save and load through ioshape, under "ioshape run".

The class pickles into memory and writes that through fsspec, so torch.save never sees the path.
Plugins that wrap it, such as AsyncCheckpointIO, and classes derived from it then use ioshape, too.
Other CheckpointIO plugins are not changed.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ioshape._integrations.tested import is_tested
from ioshape._load.load import load as our_load
from ioshape._save.save import save as our_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def patch(torch_io: Any, *, loads: bool) -> None:
    """Replace the save method of the class, and with `loads` its load method."""
    # No tier: Lightning removes only checkpoints that it sees in the directory.
    directly = functools.partial(our_save, tier=False)
    save_by_lightning, load_by_lightning = torch_io.save_checkpoint, torch_io.load_checkpoint

    @functools.wraps(save_by_lightning)
    def save_checkpoint(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        by_lightning = functools.partial(save_by_lightning, self)
        save(by_lightning, directly, checkpoint, path, storage_options)

    @functools.wraps(load_by_lightning)
    def load_checkpoint(
        self: Any, path: Any, map_location: Any = as_it_was, weights_only: bool | None = None
    ) -> Any:
        return load(functools.partial(load_by_lightning, self), path, map_location, weights_only)

    torch_io.save_checkpoint = save_checkpoint
    if loads:
        torch_io.load_checkpoint = load_checkpoint


def follow(torch_io: ModuleType, *, load: bool) -> None:
    """Patch Lightning. "ioshape run" calls this when the module that saves has been imported."""
    package = "lightning" if torch_io.__name__.startswith("lightning.") else "lightning_fabric"
    if is_tested(package):
        patch(torch_io.TorchCheckpointIO, loads=load)


# ---- Checkpoints of Lightning that ioshape handles -----------------------------------------------


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
