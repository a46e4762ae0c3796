# SPDX-License-Identifier: Apache-2.0
"""Test that each layer includes only layers below it, through one header each."""

import re
from pathlib import Path

import pytest
from tree import FLOORS, HEADERS, LIBRARY, ROOT, build_folder, code, sources

from tests.bench.house import calls_among_files, circles

#: Declares what the Python package needs beyond the public headers.
INTERNAL = LIBRARY / "internal.h"
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def violations(path: Path, floor: str, text: str) -> list[str]:
    """Return the includes of a file that its layer must not have."""
    own = LIBRARY / floor
    below = FLOORS[: FLOORS.index(floor)]
    found = []
    for quote, name in INCLUDE.findall(text):
        first = name.split("/")[0]
        if name == "internal.h":
            allowed = path == LIBRARY / "base" / "base.h"  # all other files include base.h
        elif quote == "<":
            # Public and system headers are allowed. A layer in angle brackets would evade the rule.
            allowed = first not in FLOORS
        elif first == floor:
            allowed = (own.parent / name).is_file()
        else:
            allowed = first in below and name == f"{first}/{first}.h"
        if not allowed:
            found.append(f"{path}: may not include {name}")
    return found


def test_every_folder_is_a_floor() -> None:
    folders = {path.name for path in LIBRARY.iterdir() if any(path.glob("*.[ch]"))}
    assert folders, "no floors at all?"
    assert folders <= set(FLOORS)


def test_floors_are_respected() -> None:
    found = []
    for path in set(sources("libioshape")) - {INTERNAL}:
        floor = path.relative_to(LIBRARY).parts[0]
        assert floor in FLOORS, f"{path} is on no floor"
        found += violations(path, floor, code(path))
    assert not found, "\n".join(found)


def test_calls_among_files_go_one_way() -> None:
    calls = calls_among_files(build_folder() / "libioshape" / "libioshape_internal.a.p")
    assert len(calls) > 30, "no objects of the library?"
    found = [" ".join(sorted(circle)) for circle in circles(calls)]
    assert not found, "files that call each other: " + "; ".join(found)


def test_a_circle_of_calls_is_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_the_package_includes_what_is_declared_for_it() -> None:
    package = ROOT / "bindings"
    own = {path.name for path in package.glob("*.h")}
    for path in package.glob("*.h"):
        for quote, name in INCLUDE.findall(code(path)):
            allowed = quote == "<" or name in own | {"internal.h", "base/settings.def"}
            assert allowed, f"{path} includes {name}; declare what it needs in internal.h"


def test_public_headers_include_only_public_and_system_headers() -> None:
    for path in sources("include"):
        for quote, name in INCLUDE.findall(code(path)):
            assert quote == "<", f"{path}: {name} in quotes depends on where the file lies"
            if name.startswith("ioshape/"):
                assert (HEADERS.parent / name).is_file(), f"{path}: there is no {name}"
            else:
                assert name.split("/")[0] not in FLOORS, f"{path}: {name} is not installed"


@pytest.mark.parametrize(
    ("floor", "include"),
    [
        ("base", '#include "fs/fs.h"'),  # upwards
        ("save", '#include "io/queue.h"'),  # not the layer's main header
        ("group", '#include "save/file.h"'),  # not the layer's main header, either
        ("save", '#include "group/group.h"'),
        ("format", "#include <io/io.h>"),  # angle brackets, which evade the rule
        ("io", '#include "../base/base.h"'),  # relative, which evades the rule
        ("fs", '#  include "io/io.h"'),
        ("format", '#include "internal.h"'),  # past base.h
    ],
)
def test_the_rule_notices(floor: str, include: str) -> None:
    assert violations(LIBRARY / floor / "example.c", floor, include)
