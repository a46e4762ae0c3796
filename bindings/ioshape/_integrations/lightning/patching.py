# SPDX-License-Identifier: Apache-2.0
"""Make Lightning's TorchCheckpointIO save and load through ioshape, under "ioshape run".

The class pickles into memory and writes that through fsspec, so torch.save never sees the path.
Plugins that wrap it, such as AsyncCheckpointIO, and classes derived from it then use ioshape, too.
Other CheckpointIO plugins are not changed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ioshape._integrations.lightning.files import as_it_was, load, save
from ioshape._integrations.tested import is_tested
from ioshape._save.save import save as our_save

if TYPE_CHECKING:
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
