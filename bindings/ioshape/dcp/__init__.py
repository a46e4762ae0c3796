# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint through this library: durable, atomic, verified.

    import torch.distributed.checkpoint as dcp
    import ioshape.dcp

    dcp.save(state, storage_writer=ioshape.dcp.Writer("runs/step-1000"))
    dcp.load(state, storage_reader=ioshape.dcp.Reader("runs/step-1000"))

The files are those of DCP's own FileSystemWriter: its FileSystemReader reads them, and Reader reads
what it has written. ioshape.patch(dcp=True) puts both into code that names neither.
"""

from __future__ import annotations

from ioshape.dcp._reader import Reader
from ioshape.dcp._writer import Writer

__all__ = ["Reader", "Writer"]
