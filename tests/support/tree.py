# SPDX-License-Identifier: Apache-2.0
"""Paths in the source tree and in the build that is tested."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "libioshape"
HEADERS = ROOT / "include" / "ioshape"

#: PYTHONPATH with which programs and shell scripts find the tests' helpers. pyproject.toml lists
#: these folders for pytest and mypy.
PYTHONPATH = os.pathsep.join(
    str(ROOT / "tests" / name)
    for name in (
        "support",
        "support/harm",
        "support/models",
        "support/programs",
        "support/servers",
        "tools",
    )
)

# Layers, lowest first. Includes layers of the design that have no folder yet.
FLOORS = ["base", "fs", "io", "format", "slots", "save", "group", "tier", "preload", "mpi"]
# The last layer is a library of its own, which includes public headers only.

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def build_folder() -> Path:
    """Return the meson build folder from which tests take programs and libraries."""
    return Path(os.environ.get("IOSHAPE_TEST_BUILD", ROOT / "build" / "gcc"))


def code(path: Path) -> str:
    """Return the text of a C file without its comments."""
    return COMMENT.sub(" ", path.read_text(encoding="utf-8"))


def sources(*folders: str) -> Iterator[Path]:
    """Yield all C and C++ files below these folders of the repository."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".c", ".h", ".cpp", ".hpp"}:
                yield path


def program(name: str) -> str:
    """Return the path of a program that the test needs."""
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed; run tests/support/setup.sh test")
    return path


if __name__ == "__main__":
    print(PYTHONPATH)
