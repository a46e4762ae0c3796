# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint through this library: durable, atomic, verified.

    import torch.distributed.checkpoint as dcp
    import ioshape.dcp

    dcp.save(state, storage_writer=ioshape.dcp.Writer("runs/step-1000"))
    dcp.load(state, storage_reader=ioshape.dcp.Reader("runs/step-1000"))

The files are those of DCP's own FileSystemWriter: its FileSystemReader reads them, and Reader reads
what it has written. ioshape.patch(dcp=True) and "ioshape run" put both into code that names
neither.
"""

from __future__ import annotations

# First of all: "ioshape run" patches as soon as it is imported, and that must not find a module of
# ours half imported.
import torch.distributed.checkpoint  # noqa: F401 # isort: skip

from ioshape._integrations.dcp.newest import load_latest
from ioshape._integrations.dcp.reader import Reader
from ioshape._integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer", "load_latest"]
