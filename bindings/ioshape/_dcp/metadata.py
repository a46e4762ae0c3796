# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's .metadata: read without running anything of it, and the names of its files."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.metadata

from ioshape._errors import FormatError, StorageError, failure
from ioshape._native import lib

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"
#: of data files: rank and number
DATA = re.compile(r"__(\d+)_(\d+)\.distcp")
#: of those that ranks write each for itself, under use_collectives=False
OF_A_RANK = re.compile(r"__(\d+)\.metadata")

# A million tensors take a tenth of that.
_MOST_BYTES = 1 << 31

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
    try:
        with open(name, "rb") as file:  # noqa: PTH123
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        code = -(error.errno or errno.EIO)
        raise failure(code, f'cannot read "{name}": {error.strerror}', name, "load") from None
    try:
        if len(data) > _MOST_BYTES:
            raise pickle.UnpicklingError("it is too large")
        metadata = _Unpickler(io.BytesIO(data)).load()
        if type(metadata).__name__ != "Metadata":
            raise pickle.UnpicklingError("it holds something else")
        _check_names(metadata)
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(
            failure(
                lib.IOSHAPE_E_FORMAT,
                f'"{name}" is no description of a checkpoint: {str(error)[:300]}',
                name,
                "load",
                remedy="if you trust it, and a planner of yours has put a class there, name that "
                "to torch.serialization.add_safe_globals() before",
            ).facts
        ) from None
    return metadata  # type: ignore[no-any-return] # looked at above


def _check_names(metadata: Metadata) -> None:
    """Files lie in the checkpoint's directory or below."""
    for info in (metadata.storage_data or {}).values():
        name = getattr(info, "relative_path", None)
        if name is None:
            continue
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise pickle.UnpicklingError(f"it names {str(name)[:100]!r} as a file of its own")


def files_of(metadata: Metadata) -> set[str]:
    """The data files that it refers to."""
    return {
        info.relative_path
        for info in (metadata.storage_data or {}).values()
        if hasattr(info, "relative_path")
    }
