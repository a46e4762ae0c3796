# SPDX-License-Identifier: Apache-2.0
"""Write the items of a save plan, one after the other, to data files.

Each tensor is an archive of its own in the file, as in DCP's own code, which uses torch.save. These
archives are those of ioshape.save: they come straight from the tensors' memory, also from a GPU's,
and have a checksum for each MiB.
"""

from __future__ import annotations

import pickle
import re
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ioshape import _torch as original
from ioshape._integrations.dcp.shares import most_bytes
from ioshape._save import pickling
from ioshape._save.pickling import records_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from ioshape._save.atomic import AtomicFile

# the protocol of torch.save
_PROTOCOL = 2

# The state of an optimizer in a state dict: "optimizer.state.0.exp_avg"
_OF_OPTIMIZER = re.compile(r"\boptim\w*\.state\.")


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage holds nothing else."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.cpu().clone()  # needs less GPU memory than a clone there


def _name_of(item: WriteItem) -> str:
    """Return the name of an item in alarms, with the offset of a shard that has one."""
    offset = item.index.offset
    return f"{item.index.fqn}{list(offset)}" if offset and any(offset) else item.index.fqn


def _writer_of(item: WriteItem, data: Any) -> tuple[int, Callable[[AtomicFile], object]]:
    """Return the largest size of an item in bytes, and a function that writes it to a file."""
    if item.type == WriteItemType.BYTE_IO:
        content = data.getbuffer()
        return content.nbytes, lambda file: file.write(content)
    tensor = _alone(data.detach())
    try:
        pickled = pickling.collect(tensor, pickle, _PROTOCOL)
    except pickling.Unsupported:
        return sys.maxsize, lambda file: original.save(tensor, file)
    if _OF_OPTIMIZER.search(item.index.fqn):
        pickled.optimizer_storages = frozenset({tensor.untyped_storage().data_ptr()})
    name = _name_of(item)
    return most_bytes(pickled.n_bytes), lambda file: file.write_records(name, records_of(pickled))


def write_items(
    file_for: Callable[[int], tuple[AtomicFile, str]], items: list[WriteItem], planner: SavePlanner
) -> list[WriteResult]:
    """Write all items in DCP's order: those that are not tensors come first.

    Args:
        file_for: Returns the file that takes an item of at most so many bytes, and its name.
        items: The items.
        planner: The planner, which knows the data of the items.

    Returns:
        The results for DCP, with the position of each item.
    """
    written = []
    for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
        most, write = _writer_of(item, planner.resolve_data(item))
        file, name = file_for(most)
        begin = file.tell()
        write(file)
        n_bytes = file.tell() - begin
        info = filesystem._StorageInfo(name, begin, n_bytes)
        written.append(WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=info))
    return written
