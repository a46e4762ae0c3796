# SPDX-License-Identifier: Apache-2.0
"""torch.save for training clusters: durable, atomic, verified checkpoints at the speed of the disk.

Example:

    import ioshape

    ioshape.save(model.state_dict(), "model.pt")  # Durable on return.
    handle = ioshape.save_async(state, "model.pt")  # `state` may change now.
    state = ioshape.load("model.pt")  # Verified.

The files are ordinary torch.save files. ioshape.patch() replaces torch.save and torch.load in code
that you cannot edit; "ioshape run train.py" does it for a whole script.

Importing this package does not import torch: the first save or load imports it.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import RLock, get_ident
from importlib import import_module
from typing import TYPE_CHECKING

from ioshape._core import descriptors as _descriptors

if TYPE_CHECKING:
    from ioshape import errors, staging, types
    from ioshape._core.config import configure, settings
    from ioshape._core.errors import DamagedError, FallbackWarning, SkippedWarning, StorageError
    from ioshape._core.job import job
    from ioshape._core.report import Report
    from ioshape._core.under_way import wait_all
    from ioshape._files.directory import directory
    from ioshape._files.open import open  # noqa: A004 - as gzip.open
    from ioshape._group.checkpoints import checkpoints, latest, prune
    from ioshape._group.group import save_group, save_group_async
    from ioshape._group.load import load_group, load_latest
    from ioshape._load.contents import inspect, verify
    from ioshape._load.load import load
    from ioshape._probe import probe
    from ioshape._run.patch import patch, patched, unpatch
    from ioshape._save.handle import SaveHandle
    from ioshape._save.lazy import before_step
    from ioshape._save.preemption import on_preemption
    from ioshape._save.save import save, save_async
    from ioshape._slots.slots import slot

    __version__: str

# The module that defines each public name. It is imported when a name is first used, so that
# "import ioshape" costs nothing in processes that never save.
_HOMES = {
    "DamagedError": "_core.errors",
    "FallbackWarning": "_core.errors",
    "Report": "_core.report",
    "SaveHandle": "_save.handle",
    "SkippedWarning": "_core.errors",
    "StorageError": "_core.errors",
    "before_step": "_save.lazy",
    "configure": "_core.config",
    "directory": "_files.directory",
    "checkpoints": "_group.checkpoints",
    "inspect": "_load.contents",
    "job": "_core.job",
    "latest": "_group.checkpoints",
    "load": "_load.load",
    "load_group": "_group.load",
    "load_latest": "_group.load",
    "on_preemption": "_save.preemption",
    "open": "_files.open",
    "patch": "_run.patch",
    "patched": "_run.patch",
    "probe": "_probe",
    "prune": "_group.checkpoints",
    "save": "_save.save",
    "save_async": "_save.save",
    "save_group": "_group.group",
    "save_group_async": "_group.group",
    "settings": "_core.config",
    "slot": "_slots.slots",
    "unpatch": "_run.patch",
    "verify": "_load.contents",
    "wait_all": "_core.under_way",
}

# Modules that import torch. The first use of a name from one of them imports all public names. The
# first use of a name from another module imports only the names that need no torch.
_WITH_TORCH = (
    "_group.group",
    "_group.load",
    "_load.load",
    "_run.patch",
    "_save.lazy",
    "_save.save",
)

# Public submodules, which are imported together with the names.
_MODULES = ("errors", "staging", "types")

# Top-level names of version 0.1, each with the submodule that has it now. Version 0.3 removes these
# aliases. _RENAMED has those that also have another name.
_MOVED = {
    **dict.fromkeys(
        (
            "CanceledError",
            "CoordinatorError",
            "Different",
            "FormatError",
            "MismatchError",
            "NoUsableCheckpointError",
            "PassedOver",
        ),
        "errors",
    ),
    **dict.fromkeys(("reserve", "trim"), "staging"),
    **dict.fromkeys(
        (
            "AtomicFile",
            "Contents",
            "Generation",
            "Job",
            "Notice",
            "Part",
            "Place",
            "Progress",
            "Record",
            "Slot",
            "SlotInfo",
            "Step",
            "Storage",
            "StorageTarget",
            "StoredTensor",
            "Tensor",
            "VerifiedFile",
        ),
        "types",
    ),
    "generations": "_group.checkpoints",
}

_RENAMED = {
    "Generation": "Checkpoint",
    "Part": "Shard",
    "Step": "Downgrade",
    "generations": "checkpoints",
}

# The keys of _HOMES and __version__, as a literal list that type checkers understand.
__all__ = [
    "DamagedError",
    "FallbackWarning",
    "Report",
    "SaveHandle",
    "SkippedWarning",
    "StorageError",
    "__version__",
    "before_step",
    "checkpoints",
    "configure",
    "directory",
    "inspect",
    "job",
    "latest",
    "load",
    "load_group",
    "load_latest",
    "on_preemption",
    "open",
    "patch",
    "patched",
    "probe",
    "prune",
    "save",
    "save_async",
    "save_group",
    "save_group_async",
    "settings",
    "slot",
    "unpatch",
    "verify",
    "wait_all",
]


# Type checkers must not see __getattr__: they would then accept misspelled names.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from ioshape._native import ffi, lib  # noqa: PLC0415

            globals()[name] = ffi.string(lib.ioshape_version()).decode()
        elif name in _MOVED:
            return _moved(name)
        elif name == "pool_name":
            raise AttributeError("ioshape.pool_name() was removed: use ioshape.probe(path).pool")
        elif name not in _HOMES and name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        elif not _try_to_bring_in(name):
            return import_module(f"{__name__}._early").save
        value: object = globals()[name]
        return value


def _moved(name: str) -> object:
    from warnings import warn  # noqa: PLC0415 - only for old programs

    home, now = _MOVED[name], _RENAMED.get(name, name)
    value: object = getattr(import_module(f"{__name__}.{home}"), now)
    where = f"ioshape.{now}" if now in _HOMES else f"ioshape.{home}.{now}"
    sentence = f"ioshape.{name} is now {where}; version 0.3 removes the old name"
    warn(sentence, DeprecationWarning, stacklevel=3)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


# ---- Imports and forks ------------------------------------------------------------------------

# If a process forks while another thread imports a module, the child can never import that module:
# its import lock stays taken. So all names are imported at once, and a fork waits until they are.

# The longest wait of a fork. It is bounded: the importing thread may wait for the forking one.
_MOST_WAIT_S = 60.0


class _FirstUse:
    """A context manager that delays forks by other threads until the block ends."""

    def __init__(self) -> None:
        # Held for moments, and while the process forks. It is reentrant because a signal handler
        # can run meanwhile and take it, too.
        self._gate = RLock()
        self._threads: list[int] = []  # thread ids, one entry for each block entered
        #: whether this process was forked in the middle of a block of another thread
        self.was_cut_off = False

    def __enter__(self) -> None:
        with self._gate:
            self._threads.append(get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(get_ident())

    def is_here(self) -> bool:
        """Return whether this thread is in a block, so that the caller is a signal handler."""
        return get_ident() in self._threads

    def _others(self) -> bool:
        return any(thread != get_ident() for thread in self._threads)

    def before_fork(self) -> None:
        end = time.monotonic() + _MOST_WAIT_S
        self._gate.acquire()
        while self._others() and time.monotonic() < end:
            self._gate.release()
            time.sleep(0.001)
            self._gate.acquire()

    def in_child(self) -> None:
        self.was_cut_off = self._others()
        self._threads = [thread for thread in self._threads if thread == get_ident()]

    def hold_forks(self) -> None:
        # Python drops an exception that a signal handler raises in a Python function called at a
        # fork. The lock's release() is no Python function: no handler can run in it and skip it.
        os.register_at_fork(before=self.before_fork, after_in_child=self.in_child)
        release = self._gate.release
        os.register_at_fork(after_in_parent=release, after_in_child=release)


_first_use = _FirstUse()
_first_use.hold_forks()


# ---- Signals ----------------------------------------------------------------------------------

# A signal handler can interrupt an import. It sees the modules half imported, and Python cannot
# complete them before the handler returns. So save() in a handler uses _early.py, which needs none
# of these modules.


def _is_half_imported(*names: str) -> bool:
    """Return whether the import of one of these modules has begun and not ended."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in names)
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _try_to_bring_in(name: str) -> bool:
    """Import the public names. Return False if only save() of _early.py can be used here.

    Args:
        name: the public name that the program asked for.
    """
    is_save = name == "save"
    if _first_use.is_here():
        if is_save:
            return False
        raise RuntimeError(
            f"cannot use ioshape.{name} here: the handler of this signal has interrupted the first "
            "use of ioshape, whose imports are incomplete; use ioshape once before the first "
            "signal, or call ioshape.save() in the handler"
        )
    if is_save and _is_half_imported("torch"):
        return False
    try:
        _bring_in(with_torch=_HOMES.get(name) in _WITH_TORCH)
    except (ImportError, AttributeError):
        # The handler may have interrupted the import of a module that ioshape needs.
        if not is_save or not _is_half_imported(*sys.modules):
            raise
        return False
    return True


def _bring_in(*, with_torch: bool) -> None:
    if _first_use.was_cut_off:
        raise RuntimeError(
            "cannot use ioshape in this process: it was forked while another thread used ioshape "
            "for the first time; use it once before you fork"
        )
    with _first_use:
        if with_torch:
            # torch comes first: "ioshape run" patches as soon as torch is imported, and its hook
            # must not find a half-imported module of ioshape.
            try:
                import_module("torch")
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ModuleNotFoundError(
                    "cannot save or load objects: torch is not installed; install it: pip install "
                    "torch (ioshape.open() and the command ioshape work without it)",
                    name="torch",
                ) from None
        values = {
            name: getattr(import_module(f"{__name__}.{home}"), name)
            for name, home in _HOMES.items()
            if with_torch or home not in _WITH_TORCH
        }
        modules = {name: import_module(f"{__name__}.{name}") for name in _MODULES}
        for value in values.values():
            # Messages and pickles then name the public module, not the one that defines the object.
            value.__module__ = __name__
        # A single update: a signal handler finds all names or none.
        globals().update(modules | values)
