# SPDX-License-Identifier: Apache-2.0
"""Test that the product stays within budget.json, which bounds its lines and shared functions.

When code becomes smaller its bound must follow, so that it does not grow again unnoticed: python
tests/tools/sizes.py writes the current values. A commit that raises a bound gives the reason.
"""

import json
from pathlib import Path

import pytest
import sizes
from sizes import BUDGET, Shared, lines_of_code, shared_functions

#: A bound may exceed the current value by this fraction and this constant.
SLACK, SOME = 0.01, 3

FOUND = sizes.sizes()
BOUNDS: dict[str, dict[str, int]] = json.loads(BUDGET.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("what", "folder"), [(what, folder) for what, folders in FOUND.items() for folder in folders]
)
def test_the_product_is_within_its_budget(what: str, folder: str) -> None:
    found, bound = FOUND[what][folder], BOUNDS[what].get(folder, 0)
    assert found <= bound, f"{folder} has {found} {what}, and {bound} in {BUDGET}"
    assert bound <= found * (1 + SLACK) + SOME, (
        f"{folder} has {found} {what}, and still {bound} in {BUDGET}; run tests/tools/sizes.py"
    )


def test_the_budget_names_nothing_that_is_gone() -> None:
    assert {what: set(folders) for what, folders in BOUNDS.items()} == {
        what: set(folders) for what, folders in FOUND.items()
    }


def test_lines_without_code_do_not_count() -> None:
    assert lines_of_code("a.c", "/* a\n * b */\n\nint a; // c\n") == 1
    assert lines_of_code("a.py", '# a\n\n"""b\nc"""\nx = 1\n') == 3
    assert lines_of_code("a.lua", "-- a\nlocal x = 1 -- b\n") == 1


def test_functions_for_other_files_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "io"
    folder.mkdir()
    (folder / "ring.h").write_text(
        "int used(int a,\n\t int b);\nconst char *alone(void);\nstatic inline int own(void)\n{\n}\n"
    )
    (folder / "a.c").write_text("int used(int a, int b)\n{\n}\n\nconst char *alone(void)\n{\n}\n")
    (folder / "b.c").write_text("static int one(void)\n{\n\treturn used(1, 2);\n}\n")
    monkeypatch.setattr(sizes, "LIBRARY", tmp_path)
    assert shared_functions() == [Shared("alone", "io", 0), Shared("used", "io", 1)]
