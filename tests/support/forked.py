# SPDX-License-Identifier: Apache-2.0
"""Makes processes that crew.py and nursery.py have forked the programs that were asked for.

A request is JSON with the program's "arguments", "environment" and "folder".
"""

import atexit
import ctypes
import gc
import os
import sys
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: modules that are in memory when programs are forked, except those of ioshape
_imported: dict[str, types.ModuleType] = {}


# The first callback that a process registers is the last that it calls.
@atexit.register
def _forget() -> None:
    """Hide the modules from the end of Python, which would clear each of their objects."""
    for name in _imported:
        sys.modules.pop(name, None)


def let_forks_end_fast() -> None:
    """Spare the programs that will be forked what takes them longer at their end than their work.

    Each object of torch that the end visits is in memory that the process must copy first. So the
    garbage collector and the end of Python do not visit these objects, torch does not withdraw its
    operators, and its C++ destructors, which free memory, do not run. Everything that a program
    registers for its end runs before, and its own modules and those of ioshape end as always. The
    stage coverage needs the full end: C code writes its counts last.
    """
    _imported.update(
        (name, module)
        for name, module in sys.modules.items()
        if name not in ("builtins", "sys", "__main__") and name.partition(".")[0] != "ioshape"
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))  # it outlives this module
    for one in getattr(weakref.finalize, "_registry", ()):
        one.atexit = False
    gc.collect()
    gc.freeze()
    if "COVERAGE_FILE" not in os.environ:
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


def enter(namespace: str) -> None:
    """Enter a namespace, such as /proc/PID/ns/net."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as file:  # noqa: PTH123
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def become(request: dict[str, Any], descriptors: Sequence[int], first: int) -> None:
    """Make this forked process the program of a request, and run it.

    The descriptors become 0, 1, 2 and so on, from `first`.
    """
    for number, descriptor in enumerate(descriptors, start=first):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    path = request["arguments"][0]
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), main.__dict__)
