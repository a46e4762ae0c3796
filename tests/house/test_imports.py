# SPDX-License-Identifier: Apache-2.0
"""Test that the packages of ioshape have no import cycles, and integrations are at the top."""

from importlib import metadata
from pathlib import Path

import pytest
from imports import cycles, imports
from ioshape._integrations.huggingface.patching import MODULES

# Modules that give users an integration by name. All other code works without integrations.
ABOVE = {
    "ioshape._run",
    "ioshape.dcp",
    "ioshape.deepspeed",
    "ioshape.lightning",
    "ioshape.megatron",
    "ioshape.safetensors",
    "ioshape.torch_checkpointing",
    "ioshape.transformers",
}


def test_no_package_leads_back_to_itself() -> None:
    found = imports()
    assert len(found) > 100
    assert cycles(found) == []


def test_only_those_above_import_integrations() -> None:
    found = {one for one in imports() if one.wanted_package == "ioshape._integrations"}
    assert {one.package for one in found} - ABOVE == set()
    by_run = {one.module for one in found if one.package == "ioshape._run"}
    assert by_run <= {"ioshape._run.patch"}


@pytest.mark.parametrize("inside", [False, True])
def test_the_rule_notices(tmp_path: Path, inside: bool) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        folder = tmp_path / "ioshape" / f"_{name}"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        line = f"from ioshape._{other} import b as c"
        (folder / "a.py").write_text(f"def f():\n    {line}\n" if inside else line)
        (folder / "b.py").touch()
    assert cycles(imports(tmp_path / "ioshape")) == [["ioshape._one", "ioshape._two"]]


def test_what_type_checkers_read_does_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "ioshape" / "_one"
    folder.mkdir(parents=True)
    (folder.parent / "two.py").touch()
    (folder / "a.py").write_text("if TYPE_CHECKING:\n    import ioshape.two\n")
    assert imports(tmp_path / "ioshape") == []
    (folder / "a.py").write_text("import ioshape.two\n")
    assert [one.wanted for one in imports(tmp_path / "ioshape")] == ["ioshape.two"]


def test_every_module_of_hugging_face_has_an_entry_point() -> None:
    points = metadata.entry_points(group="ioshape.integrations")
    ours = "ioshape._integrations.huggingface.patching:follow"
    assert {one.name for one in points if one.value == ours} == set(MODULES)
