# SPDX-License-Identifier: Apache-2.0
"""Test that version numbers agree in all places, and that every file names its license."""

import re

import pytest
from tree import HEADERS, ROOT

VERSION_IN_MESON = re.compile(r"^\s*version: '(\d+)\.(\d+)\.(\d+)',", re.MULTILINE)


def meson_text() -> str:
    return (ROOT / "meson.build").read_text(encoding="utf-8")


def version_in_meson() -> tuple[str, str, str]:
    found = VERSION_IN_MESON.search(meson_text())
    assert found
    return found[1], found[2], found[3]


def test_version_header_says_what_meson_says() -> None:
    header = (HEADERS / "ioshape.h").read_text(encoding="utf-8")
    macros = dict(re.findall(r"#define IOSHAPE_VERSION(\w*)[ \t]+(\S+)", header))
    major, minor, patch = version_in_meson()
    assert macros == {
        "_MAJOR": major,
        "_MINOR": minor,
        "_PATCH": patch,
        "": f'"{major}.{minor}.{patch}"',
    }


def test_the_changelog_begins_with_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[([\d.]+)\]", changelog, re.MULTILINE)
    assert versions[0] == ".".join(version_in_meson())


def test_no_package_asks_for_a_later_version() -> None:
    """Check that symbols have the version that began the soname."""
    text = (ROOT / "bindings/packaging/debian/libioshape1.symbols").read_text(encoding="utf-8")
    (since,) = re.findall(r"^ \(symver\)IOSHAPE_1 (\d+)\.(\d+)\.(\d+)$", text, re.MULTILINE)
    note = re.search(
        r"^# The ABI's number: .* 1: version (\d+)\.(\d+)$", meson_text(), re.MULTILINE
    )
    assert note
    assert since == (note[1], note[2], "0")
    assert tuple(map(int, since)) <= tuple(map(int, version_in_meson()))


def test_every_public_header_is_installed() -> None:
    listed = set(re.findall(r"'ioshape/([\w.]+)'", (ROOT / "include/meson.build").read_text()))
    assert listed == {path.name for path in HEADERS.iterdir()}


@pytest.mark.parametrize(
    "folder", [".ci", "bindings", "docs", "examples", "include", "libioshape", "tests"]
)
def test_files_name_their_license(folder: str) -> None:
    named = {".c", ".h", ".cpp", ".hpp", ".py", ".pyi", ".sh", ".sbatch", ".map", ".build", ".in"}
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in named and path.is_file() and path.stat().st_size > 0:
            head = path.read_text(encoding="utf-8")[:200]
            assert "SPDX-License-Identifier: Apache-2.0\n" in head.replace(" */", ""), path
