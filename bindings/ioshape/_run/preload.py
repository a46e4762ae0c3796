# SPDX-License-Identifier: Apache-2.0
"""The preload library under "ioshape run": programs that are not Python scripts take turns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def environment(variables: Mapping[str, str], *, everywhere: bool) -> dict[str, str]:
    """Return the environment variables that preload the library in a program and its children.

    Args:
        variables: the environment to extend.
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
