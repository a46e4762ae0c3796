# SPDX-License-Identifier: Apache-2.0
"""torch.save for training clusters: durable, atomic, verified checkpoints at the speed of the disk.

    import ioshape

    ioshape.save(model.state_dict(), "model.pt")  # on stable storage when it returns
    handle = ioshape.save_async(state, "model.pt")  # returns when `state` may change again
    state = ioshape.load("model.pt")  # checksums verified while reading

The files are ordinary torch.save files. ioshape.patch() makes torch.save and torch.load do the same
in code that is not yours, and so does "ioshape run train.py" for a whole script.

Importing this does not import torch; that happens at the first save or load.
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
    from ioshape._group.generations import generations, latest, prune
    from ioshape._group.group import save_group, save_group_async
    from ioshape._group.load import load_group
    from ioshape._latest import load_latest
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

# Where each public name lives. They are imported when one of them is first used, so that "import
# ioshape" costs nothing in the processes that never save.
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
    "generations": "_group.generations",
    "inspect": "_load.contents",
    "job": "_core.job",
    "latest": "_group.generations",
    "load": "_load.load",
    "load_group": "_group.load",
    "load_latest": "_latest",
    "on_preemption": "_save.preemption",
    "open": "_files.open",
    "patch": "_run.patch",
    "patched": "_run.patch",
    "probe": "_probe",
    "prune": "_group.generations",
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

# A name of these needs torch, and brings in all others; a name of another module brings in those
# that need no torch.
_WITH_TORCH = (
    "_group.group",
    "_group.load",
    "_latest",
    "_load.load",
    "_run.patch",
    "_save.lazy",
    "_save.save",
)

# Modules that come with them.
_MODULES = ("errors", "staging", "types")

# Names of version 0.1, with the module that has each of them now. Version 0.3 removes them here.
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
}

# The same names, in a form that type checkers understand.
__all__ = [
    "DamagedError",
    "FallbackWarning",
    "Report",
    "SaveHandle",
    "SkippedWarning",
    "StorageError",
    "__version__",
    "before_step",
    "configure",
    "directory",
    "generations",
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


# A type checker sees the names above and no others: this would hide that one is misspelled.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from ioshape._native import ffi, lib  # noqa: PLC0415

            globals()[name] = ffi.string(lib.ioshape_version()).decode()
        elif name in _MOVED:
            return _moved(name)
        elif name == "pool_name":
            raise AttributeError("ioshape.pool_name() is gone: use ioshape.probe(path).pool")
        elif name not in _HOMES and name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        elif not _try_to_bring_in(name):
            return import_module(f"{__name__}._early").save
        value: object = globals()[name]
        return value


def _moved(name: str) -> object:
    from warnings import warn  # noqa: PLC0415 - only for old programs

    home = _MOVED[name]
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    sentence = f"ioshape.{name} is ioshape.{home}.{name} now; the old name goes with version 0.3"
    warn(sentence, DeprecationWarning, stacklevel=3)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


# ---- Imports and forks ------------------------------------------------------------------------

# A child that is forked while another thread imports a module can never import it: the lock stays
# taken. So all names come at once, and a fork waits for what happens at the first use.

_PATIENCE_S = 60.0  # of a fork: the thread that imports may be waiting for the one that forks


class _FirstUse:
    """Around what must not be cut off by a fork of another thread."""

    def __init__(self) -> None:
        # Held for moments, and while the process forks; also by a signal's handler in between.
        self._gate = RLock()
        self._threads: list[int] = []  # once for each block that they are in
        #: this process was forked too early all the same
        self.was_cut_off = False

    def __enter__(self) -> None:
        with self._gate:
            self._threads.append(get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.remove(get_ident())

    def is_here(self) -> bool:
        """Return whether this thread is in such a block: a signal's handler has interrupted it."""
        return get_ident() in self._threads

    def _others(self) -> bool:
        return any(thread != get_ident() for thread in self._threads)

    def before_fork(self) -> None:
        end = time.monotonic() + _PATIENCE_S
        self._gate.acquire()
        while self._others() and time.monotonic() < end:
            self._gate.release()
            time.sleep(0.001)
            self._gate.acquire()

    def in_child(self) -> None:
        self.was_cut_off = self._others()
        self._threads = [thread for thread in self._threads if thread == get_ident()]

    def hold_forks(self) -> None:
        # Python drops what a signal's handler raises in a function that it calls at a fork. A
        # method of a lock is no Python function, so no handler can run before it.
        os.register_at_fork(before=self.before_fork, after_in_child=self.in_child)
        release = self._gate.release
        os.register_at_fork(after_in_parent=release, after_in_child=release)


_first_use = _FirstUse()
_first_use.hold_forks()


# ---- Signals ----------------------------------------------------------------------------------

# The handler of a signal can interrupt an import. Python gives it the modules half imported, and
# cannot complete them before it returns. So its save does without them, as torch.save does.


def _is_half_imported(*names: str) -> bool:
    """Return whether one of these modules is being imported."""
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in names)
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _try_to_bring_in(name: str) -> bool:
    """Bring a public name in. Return False if only save() of _early.py can be used here."""
    is_save = name == "save"
    if _first_use.is_here():
        if is_save:
            return False
        raise RuntimeError(
            f"cannot use ioshape.{name} here: this signal's handler has interrupted the first use "
            "of ioshape, and its modules are half imported; use ioshape once before the first "
            "signal, or ioshape.save() in the handler"
        )
    if is_save and _is_half_imported("torch"):
        return False
    try:
        _bring_in(with_torch=_HOMES.get(name) in _WITH_TORCH)
    except (ImportError, AttributeError):
        # A module that ioshape needs may be one that the handler has interrupted.
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
            # First of all: "ioshape run" patches as soon as torch is imported, and that must not
            # find a module of ours half imported.
            try:
                import_module("torch")
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ModuleNotFoundError(
                    "cannot save or load objects: torch is not installed; install it: pip install "
                    "torch (ioshape.open() and the command ioshape do without)",
                    name="torch",
                ) from None
        values = {
            name: getattr(import_module(f"{__name__}.{home}"), name)
            for name, home in _HOMES.items()
            if with_torch or home not in _WITH_TORCH
        }
        modules = {name: import_module(f"{__name__}.{name}") for name in _MODULES}
        for value in values.values():
            # So that messages and pickles say where programs find it, not where its file is.
            value.__module__ = __name__
        # All names at once: a signal's handler finds all of them, or none.
        globals().update(modules | values)
