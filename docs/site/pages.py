# SPDX-License-Identifier: Apache-2.0
"""Pages of the site and their order. As a program, pages.py FOLDER lays them out in a folder.

A new page of docs/ gets a line here; without one the site is not built. The folder mirrors the
repository, so that a link that works on the forge works in the site, and the other way round.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Made from the comments in the headers, as the man pages are.
C_REFERENCE = "docs/c-reference.md"

#: The site adds the docstrings of the package to this page.
PYTHON_REFERENCE = "docs/python-reference.md"

PARTS = {
    "Guide": [
        "docs/index.md",
        "docs/start.md",
        "docs/install.md",
        "docs/python.md",
        "docs/migration.md",
        "docs/groups.md",
        "docs/frameworks.md",
        "docs/gpu.md",
        "docs/preemption.md",
        "docs/tiers.md",
        "docs/objects.md",
        "docs/comparison.md",
    ],
    "Operate": [
        "docs/coordinator.md",
        "docs/schedulers.md",
        "docs/slots.md",
        "docs/preload.md",
        "docs/filesystems.md",
        "docs/runbook.md",
        "docs/troubleshooting.md",
        "docs/security.md",
        "docs/upgrading.md",
    ],
    "Reference": [
        PYTHON_REFERENCE,
        "docs/cli.md",
        "docs/cli-reference.md",
        "docs/api.md",
        C_REFERENCE,
        "docs/format.md",
    ],
    "Internals": [
        "docs/design.md",
        "docs/performance.md",
        "docs/reliability.md",
        "docs/scale.md",
        "docs/testing.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ],
}

#: A link that reads as the name of a file, which says little to readers of the site.
FILE_LINK = re.compile(r"(?<!!)\[[\w./-]+\.md\](\([\w./-]+\.md(?:#[\w-]+)?\))")

#: Of a page's folder, what its pages show or offer.
BESIDE = {".svg", ".conf", ".acl"}


def version() -> str:
    """Return the version in meson.build."""
    found = re.search(r"version: '([\d.]+)'", (ROOT / "meson.build").read_text(encoding="utf-8"))
    assert found
    return found[1]


def for_readers(text: str) -> str:
    """Empty links to files: Sphinx fills in titles. Keep a bound and its sign on one line."""
    return re.sub(r"([≤≥]) (?=[\d.])", "\\1\u00a0", FILE_LINK.sub(r"[]\1", text))


def copy(source: Path, folder: Path) -> None:
    """Copy a page. Keep the later time of the page and of this program.

    Sphinx reads only pages again whose time has changed.
    """
    target = folder / source.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".md":
        # The README is the first page.
        text = source.read_text(encoding="utf-8").replace("../README.md", "../index.md")
        target.write_text(for_readers(text), encoding="utf-8")
        changed = max(source.stat().st_mtime, Path(__file__).stat().st_mtime)
        os.utime(target, (changed, changed))
    else:
        shutil.copy2(source, target)


def table_of(title: str, pages: list[str]) -> str:
    """Return a part of the contents, which the site shows beside each page."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def add_docstrings(page: Path) -> None:
    """Add the reference of the package in .venv to its page."""
    maker = [ROOT / ".venv/bin/python", ROOT / "tests/tools/python_reference.py"]
    made = subprocess.run(maker, check=True, capture_output=True, text=True).stdout
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{made}", encoding="utf-8")


def lay_out(folder: Path) -> None:
    """Copy all pages. The README becomes the first page and gets the contents."""
    pages = [page for part in PARTS.values() for page in part]
    for page in pages:
        if page != C_REFERENCE:
            copy(ROOT / page, folder)
    for path in (ROOT / "docs").rglob("*"):
        if path.suffix in BESIDE or (path.suffix == ".md" and path.is_file()):
            copy(path, folder)  # a page without a line above makes Sphinx complain
    for path in [ROOT / "LICENSE", *(ROOT / "examples").rglob("*")]:
        if path.is_file() and "__pycache__" not in path.parts:
            copy(path, folder)
    add_docstrings(folder / PYTHON_REFERENCE)
    contents = "".join(table_of(title, part) for title, part in PARTS.items())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "index.md").write_text(for_readers(readme) + contents, encoding="utf-8")
    made = folder / "made"
    headers = sorted((ROOT / "include/ioshape").glob("*.h"))
    maker = [sys.executable, ROOT / "docs/make_reference.py", version(), made, *headers]
    subprocess.run(maker, check=True)
    shutil.copyfile(made / "reference.md", folder / C_REFERENCE)
    shutil.rmtree(made)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
