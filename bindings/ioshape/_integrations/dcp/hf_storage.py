# SPDX-License-Identifier: Apache-2.0
"""Make DCP's HuggingFaceStorageWriter write its safetensors files through ioshape."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem

from ioshape._integrations.dcp.files import FilesAlone
from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from types import ModuleType


def follow(hf_storage: ModuleType, *, load: bool) -> None:  # noqa: ARG001 - it reads as before
    """Patch the writer. "ioshape run" calls this when its module has been imported."""
    if not is_tested("torch"):
        return
    writer = hf_storage.HuggingFaceStorageWriter
    by_torch = writer.__init__

    @functools.wraps(by_torch)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        by_torch(self, *arguments, **named)
        if type(self.fs) is filesystem.FileSystem:  # not the filesystem of a URL
            self.fs = FilesAlone()
            # With sync_files DCP would sync the whole machine, because these files have no
            # descriptor.
            self.sync_files = False

    writer.__init__ = begin
