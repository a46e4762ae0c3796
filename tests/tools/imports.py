# SPDX-License-Identifier: Apache-2.0
"""Finds which packages of ioshape import which, without imports that only type checkers see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2] / "bindings" / "ioshape"


class Import(NamedTuple):
    """An import of a module from another package.

    Modules beside the packages, such as ioshape.dcp, count as packages.
    """

    module: str
    line: int
    wanted: str
    package: str
    wanted_package: str


def _modules(root: Path) -> dict[str, Path]:
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _package(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _lines(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not _is_for_checkers(node):
            yield from _lines(node)


def imports(root: Path = ROOT) -> list[Import]:
    """Return all imports that lead from one package into another.

    ioshape/__init__.py does not count: its purpose is to import modules when their names are used.
    """
    modules = _modules(root)
    found = []
    for module, path in sorted(modules.items()):
        if module == "ioshape":
            continue
        for node in _lines(ast.parse(path.read_text(encoding="utf-8"))):
            wanted = []
            if isinstance(node, ast.Import):
                wanted = [one.name for one in node.names]
            elif node.module and not node.level:
                names = [f"{node.module}.{one.name}" for one in node.names]
                wanted = [one if one in modules else node.module for one in names]
            found += [
                Import(module, node.lineno, one, _package(module), _package(one))
                for one in wanted
                if one in modules and _package(one) not in ("ioshape", _package(module))
            ]
    return found


def cycles(found: list[Import]) -> list[list[str]]:
    """Return sets of packages, each of which imports all others of its set, directly or not."""
    onward: dict[str, set[str]] = {}
    for one in found:
        onward.setdefault(one.package, set()).add(one.wanted_package)
        onward.setdefault(one.wanted_package, set())
    reached = {package: _reached(package, onward) for package in onward}
    knots = {
        tuple(sorted(other for other in reached[one] if one in reached[other])) for one in onward
    }
    return [list(knot) for knot in sorted(knots) if knot]


def _reached(package: str, onward: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = list(onward[package])
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += onward[one]
    return found
