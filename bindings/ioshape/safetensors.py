# SPDX-License-Identifier: Apache-2.0
"""safetensors files, written as safely as checkpoints. The names are those of safetensors.torch.

    from ioshape.safetensors import save_file

    save_file(model.state_dict(), "model.safetensors")  # on stable storage when it returns

The files are those of the original, to the byte. Needs the package safetensors, which checks the
tensors as it always does.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

# First of all, as in ioshape.dcp; the next import has the sentence for those who lack it.
with contextlib.suppress(ImportError):
    import safetensors  # noqa: F401 # isort: skip

from ioshape._integrations.safetensors import original  # noqa: F401 # has the sentence

import safetensors.torch as _package  # isort: skip # after the sentence for those who lack it
from safetensors import SafetensorError
from safetensors.torch import load, save

from ioshape._core.replacing import with_ours
from ioshape._core.text import one_line
from ioshape._integrations.safetensors import funnel
from ioshape._integrations.safetensors.reading import File, Slice
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    import torch

    from ioshape._core.report import Progress, Report
    from ioshape._save.handle import SaveHandle

__all__ = [
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_file_async",
    "save_model",
    "save_sharded",
]

_OURS = ("pt", "torch", "pytorch")
_BACKENDS = ("mmap", "pread")


def _through(
    write: Callable[[Any, Any, Any, SaveRequest], Any],
    request: SaveRequest,
    function: Any,
    *arguments: Any,
) -> Any:
    """Calls a function of the package; what write() makes of what it wants to write."""
    made: list[Any] = []

    def serialize_file(specs: Any, filename: Any, metadata: Any = None) -> None:
        made.append(write(specs, filename, metadata, request))

    if function is not _package.save_file:
        save_file = with_ours(_package.save_file, _package, serialize_file=serialize_file)
        function = with_ours(function, _package, save_file=save_file)
    else:
        function = with_ours(function, _package, serialize_file=serialize_file)
    function(*arguments)
    return made[0]


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    durable: bool | None = None,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    checksums: bool = False,
) -> Report:
    """Saves tensors as safetensors.torch.save_file does, durably.

    When this returns, the file is on stable storage. A reader sees the previous file or the new
    one, never half of one. Its mode follows the umask, as that of any file; the original leaves
    0600.

    Args:
        tensors: names and tensors: contiguous, dense, and no two in the same memory.
        filename: the path.
        metadata: texts that go into the header.
        durable: as in ioshape.save(), and so are the following.
        replace: the same.
        progress: the same.
        deadline: the same.
        checksums: True keeps a checksum of each MiB in a small file beside it,
            `NAME.ioshape-sums`, with which load_file() and safe_open() verify what they read. The
            file itself stays the original's.

    Returns:
        A Report.

    Raises:
        StorageError: the file could not be written. It is an OSError with errno and path.
        RuntimeError: tensors share memory: save_model() saves those of a model once.
        ValueError: a tensor is sparse, or not contiguous.
    """
    request = SaveRequest.of(durable, replace, progress, deadline, checksums=checksums)
    report: Report = _through(funnel.save, request, _package.save_file, tensors, filename, metadata)
    return report


def save_file_async(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    durable: bool | None = None,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    checksums: bool = False,
) -> SaveHandle:
    """Begins to save tensors, and returns as soon as they may change again.

    Arguments and file are those of save_file(); what the call waits for is one copy of the tensors
    in memory.

    Returns:
        A SaveHandle, as ioshape.save_async() gives it.

    Raises:
        ValueError: also for names that only the original can write: empty, or with a NUL.
    """
    request = SaveRequest.of(durable, replace, progress, deadline, checksums=checksums)
    handle: SaveHandle = _through(
        funnel.begin, request, _package.save_file, tensors, filename, metadata
    )
    return handle


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    durable: bool | None = None,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    checksums: bool = False,
) -> Report:
    """Saves a model as safetensors.torch.save_model does, durably.

    Of tensors that share memory one is saved; the metadata says which the others are.

    Args:
        model: the model.
        filename: as in save_file(), and so is what follows.
        metadata: the same.
        force_contiguous: whether tensors are made contiguous first.
        durable: the same.
        replace: the same.
        progress: the same.
        deadline: the same.
        checksums: the same.

    Returns:
        A Report.
    """
    request = SaveRequest.of(durable, replace, progress, deadline, checksums=checksums)
    report: Report = _through(
        funnel.save, request, _package.save_model, model, filename, metadata, force_contiguous
    )
    return report


def save_sharded(
    tensors: Mapping[str, torch.Tensor],
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    checksums: bool = False,
) -> list[Report]:
    """Saves tensors that are spread over ranks as one Hugging Face directory, by all of them.

    All ranks of torch.distributed call it, each with its state dict: of FSDP2, of DTensors on any
    mesh, of ShardedTensors; plain tensors are the same on all ranks that have them, and one saves
    them. The files are those that save_file() would make of the whole tensors: model.safetensors;
    or, above `max_shard_bytes`, model-00001-of-00002.safetensors and so on with
    model.safetensors.index.json. No rank gets whole tensors: each writes pieces of up to 32 MiB of
    each file, and needs memory for three of them.

    When this returns, all of it is on stable storage. A directory that is there already is replaced
    as by ioshape.directory(): its other files stay. If a rank fails or dies, it stays as it was.

    Args:
        tensors: names and tensors. Those that share memory are saved under each name.
        directory: the path, which all ranks see.
        max_shard_bytes: so much tensors take in one file, if they are not larger themselves.
        checksums: as in save_file(), beside each file.

    Returns:
        A Report for each piece that this rank wrote.

    Raises:
        StorageError: the directory could not be written, by this rank or another one.
        ValueError: something is no tensor, or ranks do not hold all of one.
    """
    from ioshape._integrations.safetensors import sharded  # noqa: PLC0415 - torch.distributed.checkpoint

    return sharded.save(tensors, os.fspath(directory), max_shard_bytes, checksums=checksums)


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a file, as safetensors.torch.load_file does.

    The file is read at once, front to back, past the page cache, and verified where it has
    checksums. The tensors have memory of their own: the file may be replaced or removed.

    Args:
        filename: the path.
        device: where the tensors are to be.
        backend: as in the original; read is in one way only.
        into: tensors by name, of the same dtype and shape, to read into. They are what is returned
            for these names; `device` does not count for them.

    Returns:
        Names and tensors.

    Raises:
        DamagedError: a checksum is wrong, or the file does not fit together.
        FormatError: it is no safetensors file.
        StorageError: the file could not be read.
        ValueError: a tensor of `into` has another dtype or shape; or is not in the file.
    """
    _check_backend(backend)
    with File(filename, device) as file:
        missing = sorted(set(into or ()) - set(file.entries))
        if missing:
            raise ValueError(f"{file.path} has no tensor {missing[0]!r}")
        return dict(file.tensors(into))


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    **backend: str,
) -> tuple[list[str], list[str]]:
    """Loads a file into a model, as safetensors.torch.load_model does.

    Returns:
        Names that the model has and the file has not, and the other way round.
    """
    ours = with_ours(_package.load_model, _package, load_file=load_file)
    found: tuple[list[str], list[str]] = ours(model, filename, strict, device, **backend)
    return found


class safe_open:  # noqa: N801 - the original's name
    """A file of which some tensors are read, as by safetensors.safe_open.

    Only what is asked for is read, and verified where the file has checksums:

        with safe_open("model.safetensors", framework="pt") as file:
            weight = file.get_tensor("weight")
            rows = file.get_slice("embedding")[100:200]
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: str | int | torch.device = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        _check_backend(backend)
        if framework not in _OURS:
            raise ValueError(
                f"ioshape.safetensors reads tensors of torch (framework 'pt'), not of "
                f"{framework!r}; use safetensors.safe_open"
            )
        self._file = File(filename, device)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self._file.entries)

    def offset_keys(self) -> list[str]:
        """The same, in the order of the file."""
        return list(self._file.entries)

    def metadata(self) -> dict[str, str] | None:
        """The texts of the header; None if it has none."""
        return self._file.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self._file.read(self._entry(name))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All of all."""
        return dict(self._file.tensors())

    def get_slice(self, name: str) -> Slice:
        """A tensor, to be indexed: only the rows that are asked for are read."""
        return Slice(self._file, self._entry(name))

    def _entry(self, name: str) -> Any:
        if name not in self._file.entries:
            raise SafetensorError(f"File does not contain tensor {one_line(name)}")
        return self._file.entries[name]


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; it is one of {', '.join(_BACKENDS)}")
