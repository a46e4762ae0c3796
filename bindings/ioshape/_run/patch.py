# SPDX-License-Identifier: Apache-2.0
"""patch(): torch.save and torch.load become ours, for code that is not ours to edit."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.serialization

from ioshape import _torch as original
from ioshape._core.locks import ForkedLock
from ioshape._core.replacing import replace
from ioshape._load.load import load as our_load
from ioshape._run import opened
from ioshape._run.passed import counted
from ioshape._run.startup import _ioshape_hook as hook
from ioshape._save import collected, small
from ioshape._save.save import is_ours, save_async
from ioshape._save.save import save as our_save

if TYPE_CHECKING:
    from collections.abc import Iterator


@functools.wraps(original.save)
def _save(
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> None:
    how = (
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
    )
    if isinstance(f, (str, os.PathLike)):
        if _use_new_zipfile_serialization and collected.begins(lambda: save_async(obj, f, *how)):
            return
        if not (_is_run() and small.save(obj, os.fspath(f), how)):
            our_save(obj, f, *how)
        return
    path = opened.path_of(f)
    if path is not None:
        with opened.moved_to(f, path):
            if not (_is_run() and small.save(obj, path, how, replaces=True)):
                our_save(obj, path, *how, tier=False)  # its owner goes on behind it
        return
    goes_past = hasattr(f, "write") and not is_ours(f)
    with counted(f) if goes_past else contextlib.nullcontext():
        our_save(obj, f, *how)


@functools.wraps(original.load)
def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **named: Any) -> Any:
    return our_load(f, map_location, pickle_module, **named)


def _is_run() -> bool:
    """Whether this is below "ioshape run": nobody has written the script with us in mind."""
    return os.environ.get("IOSHAPE_RUN", "0") != "0"


_lock = ForkedLock()
_loads: list[bool] = []  # for each patch() that is in force, whether it took torch.load as well
_others: list[tuple[str, ...]] = []  # and the modules of ours that have replaced more for it


def patch(*, load: bool = True, safetensors: bool = False, dcp: bool = False) -> None:
    """From now on torch.save and torch.load are ours, in all modules that have them already, too.

    With load=False only torch.save is. With safetensors=True the package safetensors writes its
    files through us as well, and so does all that uses it: transformers, accelerate, diffusers,
    PEFT; and directories that transformers, accelerate and huggingface_hub fill appear whole. With
    dcp=True the writer and the reader that torch.distributed.checkpoint takes for a path are those
    of ioshape.dcp; classes that derive from DCP's stay as they are. As many calls of unpatch() undo
    it. Names in modules are found, not what a class, an instance or a functools.partial has kept.
    """
    with _lock:
        # "ioshape run" patches as soon as a package is imported, and that must not find a module of
        # ours half imported.
        packages = {"safetensors": safetensors, "torch.distributed.checkpoint": dcp}
        for name in (name for name, is_wanted in packages.items() if is_wanted):
            with contextlib.suppress(ImportError):
                import_module(name)
        if safetensors:
            directories = import_module("ioshape._integrations.huggingface.patching")
        # Before anything is replaced: a package may be missing.
        wanted = {
            "ioshape._integrations.safetensors.patching": safetensors,
            "ioshape._integrations.dcp.patching": dcp,
        }
        others = tuple(name for name, is_wanted in wanted.items() if is_wanted)
        for name in others:
            import_module(name)
        for name in others:
            sys.modules[name].patch(load=load)
        if safetensors and not _is_run():
            hook.follow(dict.fromkeys(directories.MODULES, directories.follow))
        _loads.append(load)
        _others.append(others)
        # Also where it was done before: modules that were imported since may have the originals
        # from somebody who kept them.
        pairs: list[tuple[Any, Any]] = [(original.save, _save)]
        if load:
            pairs.append((original.load, _load))
        replace(pairs)


def unpatch() -> None:
    """Undoes the last patch()."""
    with _lock:
        if not _loads:
            raise RuntimeError("unpatch() without patch()")
        _loads.pop()
        for name in _others.pop():
            sys.modules[name].unpatch()
        pairs: list[tuple[Any, Any]] = []
        if not _loads:
            pairs.append((_save, original.save))
        if not any(_loads):
            pairs.append((_load, original.load))
        replace(pairs)


def is_patched() -> bool:
    """Whether torch.save is ours."""
    return torch.save is _save


@contextlib.contextmanager
def patched(*, load: bool = True, safetensors: bool = False, dcp: bool = False) -> Iterator[None]:
    """patch() for the length of a with statement."""
    patch(load=load, safetensors=safetensors, dcp=dcp)
    try:
        yield
    finally:
        unpatch()
