# SPDX-License-Identifier: Apache-2.0
"""Measures the product: lines of code, and C functions that one file provides for others.

Run `python tests/tools/sizes.py` to write tests/house/budget.json. The test in
tests/house/test_budget.py compares that file with the tree.
"""

import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import english
from tree import LIBRARY, ROOT, code

BUDGET = ROOT / "tests" / "house" / "budget.json"
#: folders of the product; generated code, blank lines and comments do not count
PRODUCT = ("libioshape", "bindings")
C_SUFFIXES = (".c", ".h")
SUFFIXES = (*C_SUFFIXES, ".def", ".lua", ".py", ".pyi")

C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
LUA_COMMENT = re.compile(r"--[^\n]*")
# Declarations of functions in headers, and definitions that other files can call.
DECLARED = re.compile(r"^(?!static|typedef|extern)(?:\w+[\s*]+)+(\w+)\(", re.MULTILINE)
DEFINED = re.compile(r"^(?!static)(?:\w+[\s*]+)+(\w+)\([^;{}]*\)\n\{", re.MULTILINE)


# ---- Lines -------------------------------------------------------------------------------------


def python_lines(text: str) -> int:
    ignored = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def lines_of_code(name: str, text: str) -> int:
    """Count the lines that are neither blank nor only comments."""
    if name.endswith((".py", ".pyi")):
        return python_lines(text)
    text = (LUA_COMMENT if name.endswith(".lua") else C_COMMENT).sub("", text)
    return sum(1 for line in text.splitlines() if line.strip())


def files_in(folder: str) -> Iterator[Path]:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            yield path


def lines_in(folder: str, *suffixes: str) -> int:
    return sum(
        lines_of_code(path.name, path.read_text(encoding="utf-8"))
        for path in files_in(folder)
        if not suffixes or path.suffix in suffixes
    )


# ---- Functions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shared:
    """A C function that a header of the library declares for other files."""

    name: str
    folder: str
    #: number of C files that use it, without the one that defines it
    callers: int


def shared_functions() -> list[Shared]:
    texts = {path: code(path) for path in LIBRARY.rglob("*") if path.suffix in C_SUFFIXES}
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    homes = {
        name: path
        for path, text in texts.items()
        if path.suffix == ".c"
        for name in DEFINED.findall(text)
    }
    return [
        Shared(
            name,
            header.relative_to(LIBRARY).parts[0],
            sum(
                name in words[path]
                for path in texts
                if path.suffix == ".c" and path != homes.get(name)
            ),
        )
        for header, text in texts.items()
        if header.suffix == ".h"
        for name in sorted(set(DECLARED.findall(text)))
    ]


# ---- Prose -------------------------------------------------------------------------------------


def unclear_prose() -> dict[str, int]:
    """Return by folder of the product, and for the pages, what tests/tools/english.py finds."""
    return {
        place: sum(1 for path in english.files(place) for _ in english.findings(path))
        for place in (*PRODUCT, "include", "docs", "tests")
    }


# ---- The budget --------------------------------------------------------------------------------


def sizes() -> dict[str, dict[str, int]]:
    """Return the figures that the budget limits."""
    functions = Counter(one.folder for one in shared_functions())
    return {
        "lines of code": {folder: lines_in(folder) for folder in PRODUCT},
        "functions for other files": dict(sorted(functions.items())),
        "places of unclear prose": unclear_prose(),
    }


if __name__ == "__main__":
    BUDGET.write_text(json.dumps(sizes(), indent="\t") + "\n", encoding="utf-8")
