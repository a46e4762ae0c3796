# SPDX-License-Identifier: Apache-2.0
"""Test that all paths in CONTRIBUTING.md exist, and that the page stays short."""

import re

import pytest
from tree import FLOORS, ROOT

GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST_LINES = 200

#: Folders in which paths of the guide may begin: the root, and folders whose tables name files.
BASES = ("", "libioshape", "bindings/ioshape")
#: Folders in which a bare file name may be. The text around it names the folder.
FOLDERS = ("bindings/ioshape", "libioshape", "tests", "docs")
#: Paths that scripts and tools make.
MADE = ("build/", "dist/", ".venv", "step-")

PATHS = sorted(
    {
        path
        for path in re.findall(r"`([\w./*-]+)`", GUIDE)
        if ("/" in path or path.endswith((".py", ".md", ".c", ".sh"))) and not path.startswith(MADE)
    }
)


def there(path: str) -> bool:
    pattern = path.rstrip("/")
    if any(list((ROOT / base).glob(pattern)) for base in BASES):
        return True
    return "/" not in path and any(list((ROOT / one).rglob(pattern)) for one in FOLDERS)


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_somewhere(path: str) -> None:
    # A name with capitals is a placeholder, such as test_NAME.c.
    assert re.search(r"[A-Z]{3}", path.replace("README", "").replace("CHANGELOG", "")) or there(
        path
    )


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", GUIDE)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_folder_of_the_source_is_named() -> None:
    """Check that each layer and each Python package has a row.

    See test_floors.py for all layers.
    """
    assert {name for name in FLOORS if f"`{name}`" not in GUIDE} == set()
    rooms = {p.name for p in (ROOT / "bindings/ioshape").iterdir() if (p / "__init__.py").exists()}
    assert rooms - {name for name in rooms if f"`{name}/`" in GUIDE} == set()


def test_it_is_read_in_one_sitting() -> None:
    assert GUIDE.count("\n") <= MOST_LINES
