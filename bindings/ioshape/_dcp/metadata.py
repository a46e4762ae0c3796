# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's .metadata: read without running anything of it, and the names of its files."""

from __future__ import annotations

import enum
import io
import os
import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.metadata

from ioshape._dcp.contents import check_file_name, no_description, read_description

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

# What the classes of torch that describe a checkpoint are called. They hold numbers, names and each
# other; to make one does nothing else.
_OURS = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.hf_storage": {"_HFStorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"frozenset", "set"},
}


def _member(kind: Any, name: Any) -> Any:
    """What getattr() is for in a description: some versions of Python save a member of an
    enumeration as that of its class."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(
        "it names builtins.getattr, which is no part of a checkpoint's description"
    )


def _trusted() -> dict[str, Any]:
    """What the program has told torch it trusts, by name."""
    get = getattr(torch.serialization, "get_safe_globals", list)
    classes = [one for one in get() if isinstance(one, type)]
    return {f"{one.__module__}.{one.__qualname__}": one for one in classes}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Of what is named, only what describes a checkpoint."""
        if name in _OURS.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        trusted = _trusted().get(f"{module}.{name}")
        if trusted is not None:
            return trusted
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is no part of a checkpoint's description"
        )


def load(path: str | os.PathLike[str]) -> Metadata:
    """The description of a checkpoint, from the file of that path.

    Raises:
        FormatError: it is none, or names what a description has no use for.
        StorageError: it could not be read.
    """
    name = os.fspath(path)
    data = read_description(name, "load")
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, torch.distributed.checkpoint.metadata.Metadata):
            raise pickle.UnpicklingError("it holds something else")
        for file in files_of(metadata):
            check_file_name(file)
    except MemoryError:
        raise
    except Exception as error:
        remedy = (
            "if you trust it, and a planner of yours has put a class there, name that to "
            "torch.serialization.add_safe_globals() before"
        )
        raise no_description(name, "load", str(error), remedy) from None
    return metadata


def files_of(metadata: Metadata) -> set[str]:
    """The data files that it refers to."""
    return {
        info.relative_path
        for info in (metadata.storage_data or {}).values()
        if hasattr(info, "relative_path")
    }
