# SPDX-License-Identifier: Apache-2.0
"""Launcher of "ioshape run": replaces this process by the user's program.

A script for Python finds the folder startup/ in PYTHONPATH. Python runs its sitecustomize, which
waits for the import of torch, before the program. So the program has the sys.argv, sys.path,
__main__, exit code and tracebacks of "python train.py". Its child processes inherit the folder, and
the preload library, which makes large writes of all other kinds take slots.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ioshape._run.startup import _ioshape_hook as hook

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


STARTUP = Path(__file__).resolve().parent / "startup"

#: Environment variable: "1", "no-load" (torch.load stays), or "0" (a child that is not patched).
VARIABLE = "IOSHAPE_RUN"


class CannotRun(Exception):
    """The program cannot be started. The message is for the user."""


def environment(variables: Mapping[str, str], *, load: bool = True) -> dict[str, str]:
    """Return the environment variables that make a Python replace torch.save.

    Args:
        variables: the environment to extend.
        load: whether torch.load is replaced, too.
    """
    before = variables.get("PYTHONPATH", "")
    # If PYTHONPATH is empty, it must not become an entry: that would be the current folder.
    others = [entry for entry in before.split(os.pathsep) if entry != str(STARTUP)]
    entries = [str(STARTUP), *(others if before else [])]
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(entries),
        VARIABLE: "1" if load else "no-load",
        hook.VARIABLE: " ".join(_integrations()),
    }


def _integrations() -> list[str]:
    """Return the entry points of integrations, as module=package.module:function.

    They are looked up here, once. Each starting Python would need the time of an import for it.
    """
    found = metadata.entry_points(group="ioshape.integrations")
    return sorted(f"{one.name}={one.value}" for one in found)


def interpreter_options(arguments: Sequence[str]) -> list[str]:
    """Return the options of Python itself, which stand before -m.

    Args:
        arguments: sys.orig_argv, such as `python -u -X dev -m ioshape run train.py`.
    """
    options: list[str] = []
    rest = iter(arguments[1:])
    for word in rest:
        if not word.startswith("-") or word in ("-", "--"):
            break
        if word.startswith("--"):
            options.append(word)
            if word == "--check-hash-based-pycs":
                options += [next(rest, "")]
            continue
        ends = [position for position, letter in enumerate(word) if position and letter in "cmWX"]
        if not ends:
            options.append(word)
        elif word[ends[0]] in "WX":
            options.append(word)
            if ends[0] == len(word) - 1:
                options.append(next(rest, ""))
        else:  # "-m", or "-um"
            options += [word[: ends[0]]] if ends[0] > 1 else []
            break
    return options


def _options() -> list[str]:
    """Return the options that the user passed to Python itself.

    Raises:
        CannotRun: an option keeps Python from reading PYTHONPATH.
    """
    if getattr(sys.modules["__main__"], "__spec__", None) is None:
        # This is the installed command. Options in its first line are the installer's choice, and
        # apply to the command only.
        return []
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise CannotRun(
            "Python's options -E, -I and -S ignore PYTHONPATH, which ioshape run needs to replace "
            "torch.save; leave them out"
        )
    return interpreter_options(sys.orig_argv)


def _check_package() -> None:
    if not sys.executable:
        raise CannotRun(
            "Python does not know the path of its executable, so it cannot start the script"
        )
    try:
        from ioshape import _native  # noqa: F401, PLC0415
    except ImportError as error:
        raise CannotRun(f"the package ioshape is incomplete ({error}); reinstall it") from None


def run(
    program: str,
    arguments: Sequence[str],
    *,
    is_module: bool,
    load: bool,
    preloads: bool = True,
    everywhere: bool = False,
) -> NoReturn:
    """Replace this process by the program.

    Args:
        program: Path of a script, path or name of another program, or the name of a module.
        arguments: Arguments of the program.
        is_module: Whether `program` is a module, as with `python -m`.
        load: Whether torch.load is replaced, too.
        preloads: Whether large writes of any kind take slots.
        everywhere: Whether they do on filesystems of this host, too.

    Raises:
        CannotRun: The program could not be started.
    """
    _check_package()
    variables = environment(os.environ, load=load)
    if preloads:
        variables = preload_environment(variables, everywhere=everywhere)
    path = None if is_module else program_of(program)
    if path is not None:
        command = [program, *arguments]
    else:
        # Python would take a name that begins with a dash as an option.
        script = f"./{program}" if program.startswith("-") and program != "-" else program
        what = ["-m", program] if is_module else [script]
        path = sys.executable
        command = [path, *_options(), *what, *arguments]
    try:
        os.execve(path, command, variables)
    except OSError as error:
        raise CannotRun(f"cannot start {path}: {error.strerror}") from None


# ---- The preload library -------------------------------------------------------------------------
#
# The preload library under "ioshape run": programs that are not Python scripts take turns.

#: The library. Its holder is in the same folder.
LIBRARY = Path(__file__).resolve().parent / "lib" / "libioshape-preload.so"

# A script that names another interpreter in its first line is a program, too.
_FIRST_BYTES = 256


def program_of(name: str) -> str | None:
    """Return the path of the program that `name` is, or None if it is a script for Python.

    A name without a slash that is no file here is looked up in PATH. A file is a program if it is
    executable, and either a binary or a script for another interpreter than Python.
    """
    if not os.path.lexists(name):
        # A launcher such as torchrun, itself a Python script, runs as the program that it is.
        return shutil.which(name) if "/" not in name else None
    return name if os.access(name, os.X_OK) and _is_other(Path(name)) else None


def _is_other(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            beginning = file.read(_FIRST_BYTES)
    except OSError:
        return False
    line = beginning.partition(b"\n")[0]
    return beginning.startswith(b"\x7fELF") or (line.startswith(b"#!") and b"python" not in line)


def preload_environment(variables: Mapping[str, str], *, everywhere: bool) -> dict[str, str]:
    """Return the environment variables that preload the library in a program and its children.

    Args:
        variables: the preload_environment to extend.
        everywhere: whether writes to filesystems of this host take slots, too.
    """
    # The loader separates the names by colons and spaces, and knows no quotes.
    if not LIBRARY.exists() or set(str(LIBRARY)) & set(": "):
        return dict(variables)
    before = variables.get("LD_PRELOAD", "")
    others = [name for name in before.replace(":", " ").split() if name != str(LIBRARY)]
    # Other libraries stay first: some must be.
    wanted = {"LD_PRELOAD": ":".join([*others, str(LIBRARY)])}
    if everywhere:
        wanted["IOSHAPE_PRELOAD_ALL"] = "yes"
    return {**variables, **wanted}
