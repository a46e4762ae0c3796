# SPDX-License-Identifier: Apache-2.0
"""The documentation's Python programs, commands and reference agree with the package."""

import ast
import re
from pathlib import Path

import ioshape
import pytest
import python_reference
import reference
from ioshape._cli.app import COMMANDS
from page_programs import DOCS, programs
from processes import run_program


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=f"{page}-{i}")
        for page in (*("python.md", "migration.md", "groups.md", "preemption.md", "start.md"),)
        for i, program in enumerate(programs(page))
        if "DistributedDataParallel" not in program  # test_train.py runs it with torchrun
    ],
)
@pytest.mark.slow
def test_programs_run(program: str, tmp_path: Path) -> None:
    assert not run_program(tmp_path, program).stderr


def test_commands_in_the_pages_exist() -> None:
    """Check the commands that pages name as `ioshape NAME` or in a line of a code block."""
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(
            r"(?:`|^    )ioshape ([a-z]+)\b", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert len(named) > len(COMMANDS)
    assert {(page, name) for page, name in named if name not in COMMANDS} == set()


def test_generated_pages_are_up_to_date() -> None:
    for path, text in reference.files().items():
        same = path.read_text(encoding="utf-8") == text
        assert same, f"{path}: run tests/tools/reference.py --write"


def test_the_page_of_the_reference_lists_every_name() -> None:
    """Check the table on the page, to which the site adds the docstrings."""
    page = (DOCS / "python-reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row) if name != "ioshape"]
    assert sorted(named) == [name for name in sorted(ioshape.__all__) if name != "__version__"]


def test_signatures_of_the_reference_parse() -> None:
    signatures = re.findall(
        r"^```python\nioshape\.([^`]+)\n```$", python_reference.reference(), re.M
    )
    assert len(signatures) > 30
    for signature in signatures:
        name, _, rest = signature.partition("(")
        ast.parse(f"def {name.replace('.', '_')}({rest}: ...")


def test_public_names_are_the_same_for_people_and_for_type_checkers() -> None:
    assert sorted(ioshape.__all__) == sorted([*ioshape._HOMES, "__version__"])
    for name in ioshape.__all__:
        assert getattr(ioshape, name) is not None
