# SPDX-License-Identifier: Apache-2.0
"""A durable and atomic replacement for safetensors.torch, with its function names.

Example:

    from ioshape.safetensors import save_file

    save_file(model.state_dict(), "model.safetensors")  # on stable storage when it returns

The files are identical to those of the original, byte by byte. This module needs the package
safetensors, which still checks the tensors.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

# safetensors is imported first, for the reason in ioshape.dcp. If it is missing, the next import
# raises the error message.
with contextlib.suppress(ImportError):
    import safetensors  # noqa: F401 # isort: skip

from ioshape._integrations.safetensors import patching  # noqa: F401 # raises if it is missing

import safetensors.torch as _package  # isort: skip # after the check above
from safetensors import SafetensorError
from safetensors.torch import load, save

from ioshape._core.replacing import with_ours
from ioshape._core.text import one_line
from ioshape._integrations.safetensors import funnel
from ioshape._integrations.safetensors.reading import File, Slice
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
]

_OURS = ("pt", "torch", "pytorch")
_BACKENDS = ("mmap", "pread")


def _through(
    write: Callable[[Any, Any, SaveRequest], Any],
    request: SaveRequest,
    function: Any,
    *arguments: Any,
) -> Any:
    """Call a function of the package safetensors with write() in place of its file writer.

    Args:
        write: Gets the tensors' specs, the metadata and the request.
        request: Passed to write().
        function: The function of the package.
        arguments: Its arguments.

    Returns:
        The result of write().
    """
    made: list[Any] = []

    def serialize_file(specs: Any, _filename: Any, metadata: Any = None) -> None:
        made.append(write(specs, metadata, request))

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
    """Save tensors as safetensors.torch.save_file does, but durably.

    When this returns, the file is on stable storage. A reader sees the previous file or the new
    one, never half of one. The file's mode follows the umask; the original creates it with 0600.

    Args:
        tensors: Tensors by name. They must be contiguous and dense, and must not share memory.
        filename: The path.
        metadata: Strings for the header.
        durable: As in ioshape.save().
        replace: As in ioshape.save().
        progress: As in ioshape.save().
        deadline: As in ioshape.save().
        checksums: True writes a checksum of each MiB to a small file beside it,
            `NAME.ioshape-sums`. load_file() and safe_open() verify with it what they read. The
            statistics of an examined save go to `NAME.ioshape-stats`. The safetensors file itself
            is the same either way.

    Returns:
        A Report.

    Raises:
        StorageError: The file could not be written. It is an OSError with errno and path.
        RuntimeError: Tensors share memory. Use save_model(), which saves shared tensors once.
        ValueError: A tensor is sparse or not contiguous.
    """
    path = os.fsdecode(filename)
    request = SaveRequest.of(path, durable, replace, progress, deadline, checksums=checksums)
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
    """Begin to save tensors in the background, and return as soon as they may change again.

    Arguments and file are those of save_file(). The call waits for one copy of the tensors in
    memory.

    Returns:
        A SaveHandle, as ioshape.save_async() returns it.

    Raises:
        ValueError: As in save_file(); also for names that only the original can write, which are
            empty or contain a NUL.
    """
    path = os.fsdecode(filename)
    request = SaveRequest.of(path, durable, replace, progress, deadline, checksums=checksums)
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
    """Save a model as safetensors.torch.save_model does, but durably.

    Tensors that share memory are saved once. The metadata lists their other names.

    Args:
        model: The model.
        filename: As in save_file().
        metadata: As in save_file().
        force_contiguous: Whether tensors are made contiguous first.
        durable: As in save_file().
        replace: As in save_file().
        progress: As in save_file().
        deadline: As in save_file().
        checksums: As in save_file().

    Returns:
        A Report.
    """
    path = os.fsdecode(filename)
    request = SaveRequest.of(path, durable, replace, progress, deadline, checksums=checksums)
    report: Report = _through(
        funnel.save, request, _package.save_model, model, filename, metadata, force_contiguous
    )
    return report


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    into: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors of a file, as safetensors.torch.load_file does.

    The file is read at once, front to back, past the page cache. It is verified if it has
    checksums. The tensors have memory of their own, so the file may be replaced or removed.

    Args:
        filename: The path.
        device: The device of the tensors.
        backend: Checked as in the original, but all values read in the same way.
        into: Tensors by name, of the same dtype and shape as in the file, to read into. They are
            returned under these names; `device` does not apply to them.

    Returns:
        Tensors by name.

    Raises:
        DamagedError: A checksum is wrong, or the file is inconsistent.
        FormatError: The file is not a safetensors file.
        StorageError: The file could not be read.
        ValueError: A tensor of `into` has another dtype or shape, or is not in the file.
    """
    _check_backend(backend)
    with File(filename, device) as file:
        missing = sorted(set(into or ()) - set(file.entries))
        if missing:
            raise ValueError(f"{file.path} has no tensor {missing[0]!r}")
        return dict(file.tensors(into=into))


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    **backend: str,
) -> tuple[list[str], list[str]]:
    """Load a file into a model, as safetensors.torch.load_model does.

    Returns:
        Names that only the model has, and names that only the file has.
    """
    ours = with_ours(_package.load_model, _package, load_file=load_file)
    found: tuple[list[str], list[str]] = ours(model, filename, strict, device, **backend)
    return found


class safe_open:  # noqa: N801 - the original's name
    """An open file whose tensors are read one by one, like safetensors.safe_open.

    Only the requested bytes are read. They are verified if the file has checksums:

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

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._file.entries)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of the file."""
        return list(self._file.entries)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the header; None if it has none."""
        return self._file.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        return dict(self._file.tensors([self._entry(name)]))[name]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Read all tensors. Return them by name."""
        return dict(self._file.tensors())

    def get_slice(self, name: str) -> Slice:
        """Return a tensor to be indexed. Indexing reads only the requested rows."""
        return Slice(self._file, self._entry(name))

    def _entry(self, name: str) -> Any:
        if name not in self._file.entries:
            raise SafetensorError(f"File does not contain tensor {one_line(name)}")
        return self._file.entries[name]


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; it takes {', '.join(_BACKENDS)}")
