# SPDX-License-Identifier: Apache-2.0
"""patch(): replaces torch.save and torch.load, for code that cannot be edited."""

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
from ioshape._core.locks import module_lock
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
                # Without a tier: the program may write more to the file itself.
                our_save(obj, path, *how, tier=False)
        return
    goes_past = hasattr(f, "write") and not is_ours(f)
    with counted(f) if goes_past else contextlib.nullcontext():
        our_save(obj, f, *how)


@functools.wraps(original.load)
def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **named: Any) -> Any:
    return our_load(f, map_location, pickle_module, **named)


def _is_run() -> bool:
    """Return whether this is below "ioshape run", so that the script does not know ioshape."""
    return os.environ.get("IOSHAPE_RUN", "0") != "0"


_lock = module_lock()
_loads: list[bool] = []  # for each patch() in force, whether it also replaced torch.load
_others: list[tuple[str, ...]] = []  # for each, the modules of ioshape that patched other packages


def patch(*, load: bool = True, safetensors: bool = False, dcp: bool = False) -> None:
    """Replace torch.save and torch.load by those of ioshape, also in modules that imported them.

    References that a class, an instance or a functools.partial holds are not replaced. Each call
    needs one call of unpatch() to undo it.

    Args:
        load: whether torch.load is replaced, too.
        safetensors: True makes the package safetensors write its files through ioshape, and with it
            transformers, accelerate, diffusers and PEFT. Directories that transformers, accelerate
            and huggingface_hub fill then appear atomically.
        dcp: True makes torch.distributed.checkpoint use the writer and reader of ioshape.dcp for
            paths. Classes that derive from DCP's writer or reader stay as they are.
    """
    with _lock:
        # The packages are imported first: "ioshape run" patches as soon as one is imported, and its
        # hook must not find a half-imported module of ioshape.
        packages = {"safetensors": safetensors, "torch.distributed.checkpoint": dcp}
        for name in (name for name, is_wanted in packages.items() if is_wanted):
            with contextlib.suppress(ImportError):
                import_module(name)
        if safetensors:
            directories = import_module("ioshape._integrations.huggingface.patching")
        # All imports come before the first replacement, because a package may be missing.
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
        # A repeated patch() replaces again: a module imported since then may have taken the
        # originals from a module that had kept them.
        pairs: list[tuple[Any, Any]] = [(original.save, _save)]
        if load:
            pairs.append((original.load, _load))
        replace(pairs)


def unpatch() -> None:
    """Undo the last patch()."""
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
    """Return whether torch.save is the one of ioshape."""
    return torch.save is _save


@contextlib.contextmanager
def patched(*, load: bool = True, safetensors: bool = False, dcp: bool = False) -> Iterator[None]:
    """Call patch() at the beginning of a with block and unpatch() at its end."""
    patch(load=load, safetensors=safetensors, dcp=dcp)
    try:
        yield
    finally:
        unpatch()
