# SPDX-License-Identifier: Apache-2.0
"""safetensors files, written as safely as checkpoints. The names are those of safetensors.torch.

    from ioshape.safetensors import save_file

    save_file(model.state_dict(), "model.safetensors")  # on stable storage when it returns

The files are those of the original, to the byte. Needs the package safetensors, which checks the
tensors as it always does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ioshape._safetensors import original

import safetensors.torch as _package  # isort: skip # after the sentence for those who lack it
from safetensors.torch import load, save

from ioshape._safetensors import funnel
from ioshape._safetensors.funnel import How
from ioshape._save.deadline import due_in
from ioshape._settings.config import is_durable

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch

    from ioshape._save.handle import SaveHandle
    from ioshape._save.report import Progress, Report

__all__ = ["load", "save", "save_file", "save_file_async", "save_model"]


def _through(write: Callable[..., Any], function: Any, *arguments: Any, **named: Any) -> Any:
    """Calls a function of the package; what write() makes of what it wants to write."""
    made: list[Any] = []

    def serialize_file(specs: Any, filename: Any, metadata: Any = None) -> None:
        made.append(write(specs, filename, metadata))

    if function is not _package.save_file:
        save_file = original.with_ours(_package.save_file, _package, serialize_file=serialize_file)
        function = original.with_ours(function, _package, save_file=save_file)
    else:
        function = original.with_ours(function, _package, serialize_file=serialize_file)
    function(*arguments, **named)
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

    Returns:
        A Report.

    Raises:
        StorageError: the file could not be written. It is an OSError with errno and path.
        RuntimeError: tensors share memory: save_model() saves those of a model once.
        ValueError: a tensor is sparse, or not contiguous.
    """
    how = How(is_durable(durable), replace, progress, due_in(deadline))

    def write(specs: Any, path: Any, texts: Any) -> Report:
        return funnel.save(specs, path, texts, how)

    report: Report = _through(write, _package.save_file, tensors, filename, metadata=metadata)
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
) -> SaveHandle:
    """Begins to save tensors, and returns as soon as they may change again.

    Arguments and file are those of save_file(); what the call waits for is one copy of the tensors
    in memory.

    Returns:
        A SaveHandle, as ioshape.save_async() gives it.

    Raises:
        ValueError: also for names that only the original can write: empty, or with a NUL.
    """
    how = How(is_durable(durable), replace, progress, due_in(deadline))

    def write(specs: Any, path: Any, texts: Any) -> SaveHandle:
        return funnel.begin(specs, path, texts, how)

    handle: SaveHandle = _through(write, _package.save_file, tensors, filename, metadata=metadata)
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

    Returns:
        A Report.
    """
    how = How(is_durable(durable), replace, progress, due_in(deadline))

    def write(specs: Any, path: Any, texts: Any) -> Report:
        return funnel.save(specs, path, texts, how)

    report: Report = _through(
        write, _package.save_model, model, filename, metadata, force_contiguous
    )
    return report
