# SPDX-License-Identifier: Apache-2.0
"""Writer and reader for torch.distributed.checkpoint (DCP): durable, atomic, verified.

Example:

    import torch.distributed.checkpoint as dcp
    from ioshape.dcp import Reader, Writer

    dcp.save(state, storage_writer=Writer("step-1000"))
    dcp.load(state, storage_reader=Reader("step-1000"))

The format is DCP's own: FileSystemReader reads files of Writer, and Reader reads files of
FileSystemWriter. ioshape.patch(dcp=True) and "ioshape run" make unchanged code use both.
"""

from __future__ import annotations

# DCP is imported first: "ioshape run" patches as soon as it is imported, and its hook must not find
# a half-imported module of ioshape.
import torch.distributed.checkpoint  # noqa: F401 # isort: skip

from ioshape._integrations.dcp.reader import Reader, load_latest
from ioshape._integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer", "load_latest"]
