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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ioshape._config import configure, settings
    from ioshape._contents import Contents, Record, Tensor, inspect, verify
    from ioshape._errors import (
        CanceledError,
        CoordinatorError,
        DamagedError,
        FormatError,
        SkippedWarning,
        StorageError,
    )
    from ioshape._generations import Generation, Part, generations, latest, prune
    from ioshape._group import save_group, save_group_async
    from ioshape._group_load import load_group
    from ioshape._handle import SaveHandle, wait_all
    from ioshape._job import Job, job
    from ioshape._load import load
    from ioshape._memory import reserve, trim
    from ioshape._patch import patch, patched, unpatch
    from ioshape._probe import Storage, StorageTarget, probe
    from ioshape._report import Progress, Report
    from ioshape._save import save, save_async
    from ioshape._slots import Place, Slot, SlotInfo, pool_name, slot

    __version__: str

# Where each public name lives. They are imported when they are first used, so that "import ioshape"
# costs nothing in the processes that never save.
_HOMES = {
    "CanceledError": "_errors",
    "Contents": "_contents",
    "CoordinatorError": "_errors",
    "DamagedError": "_errors",
    "FormatError": "_errors",
    "Generation": "_generations",
    "Job": "_job",
    "Part": "_generations",
    "Place": "_slots",
    "Progress": "_report",
    "Record": "_contents",
    "Report": "_report",
    "SaveHandle": "_handle",
    "SkippedWarning": "_errors",
    "Slot": "_slots",
    "SlotInfo": "_slots",
    "Storage": "_probe",
    "StorageError": "_errors",
    "StorageTarget": "_probe",
    "Tensor": "_contents",
    "configure": "_config",
    "generations": "_generations",
    "inspect": "_contents",
    "job": "_job",
    "latest": "_generations",
    "load": "_load",
    "load_group": "_group_load",
    "patch": "_patch",
    "patched": "_patch",
    "pool_name": "_slots",
    "probe": "_probe",
    "prune": "_generations",
    "reserve": "_memory",
    "save": "_save",
    "save_async": "_save",
    "save_group": "_group",
    "save_group_async": "_group",
    "settings": "_config",
    "slot": "_slots",
    "trim": "_memory",
    "unpatch": "_patch",
    "verify": "_contents",
    "wait_all": "_handle",
}

_WITH_TORCH = ("_group", "_group_load", "_load", "_patch", "_save")

# The same names, in a form that type checkers understand.
__all__ = [
    "CanceledError",
    "Contents",
    "CoordinatorError",
    "DamagedError",
    "FormatError",
    "Generation",
    "Job",
    "Part",
    "Place",
    "Progress",
    "Record",
    "Report",
    "SaveHandle",
    "SkippedWarning",
    "Slot",
    "SlotInfo",
    "Storage",
    "StorageError",
    "StorageTarget",
    "Tensor",
    "__version__",
    "configure",
    "generations",
    "inspect",
    "job",
    "latest",
    "load",
    "load_group",
    "patch",
    "patched",
    "pool_name",
    "probe",
    "prune",
    "reserve",
    "save",
    "save_async",
    "save_group",
    "save_group_async",
    "settings",
    "slot",
    "trim",
    "unpatch",
    "verify",
    "wait_all",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from ioshape._native import ffi, lib  # noqa: PLC0415

        value: object = ffi.string(lib.ioshape_version()).decode()
    elif name in _HOMES:
        if _HOMES[name] in _WITH_TORCH:
            # First of all: "ioshape run" patches as soon as torch is imported, and that must not
            # find a module of ours half imported.
            import_module("torch")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
