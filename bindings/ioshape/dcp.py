# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint through this library: durable, atomic, verified.

    import torch.distributed.checkpoint as dcp
    import ioshape.dcp

    dcp.save(state, storage_writer=ioshape.dcp.Writer("runs/step-1000"))
    dcp.load(state, storage_reader=ioshape.dcp.Reader("runs/step-1000"))

The files are those of DCP's own FileSystemWriter: its FileSystemReader reads them, and Reader reads
what it has written.
"""

from __future__ import annotations

from ioshape._dcp.reader import Reader
from ioshape._dcp.writer import Writer

__all__ = ["Reader", "Writer"]
