# SPDX-License-Identifier: Apache-2.0
"""Test that the pages are true: their programs run, and they mention only what exists."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tree import HEADERS, LIBRARY, ROOT, build_folder, code, program

API = ROOT / "docs" / "api.md"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]

COMPILERS = {
    "c": ["cc", "-x", "c", "-std=c11", "-Wstrict-prototypes"],
    "cpp": ["c++", "-x", "c++", "-std=c++17"],
}
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]

BLOCK = re.compile(r"^```(c|cpp)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAIN = re.compile(r"\bint main\(")
SETTING = re.compile(r"^[A-Z]+\((?:CONTEXT|GROUP|TIER), (\w+),", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of C or C++."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def programs(page: Path) -> list[tuple[str, str]]:
    return [(language, text) for language, text in blocks(page) if MAIN.search(text)]


def headers() -> str:
    return "\n".join(code(path) for path in sorted(HEADERS.glob("*.h")))


def variables() -> set[str]:
    """Return the variables of the table of settings that the library reads, and the password's."""
    table = (LIBRARY / "base/settings.def").read_text(encoding="utf-8")
    return {f"IOSHAPE_{name.upper()}" for name in SETTING.findall(table)} | {"IOSHAPE_PASSWORD"}


def described() -> str:
    """Return what the headers and the C page say, without the page's programs."""
    comments = "\n".join(path.read_text(encoding="utf-8") for path in HEADERS.glob("*.h"))
    return comments + BLOCK.sub("", API.read_text(encoding="utf-8"))


def names(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def run(*command: str | Path, folder: Path) -> None:
    libraries = build_folder() / "libioshape"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"


def compile_text(language: str, text: str, folder: Path, *options: str | Path) -> None:
    source = folder / f"text.{language}"
    source.write_text(text, encoding="utf-8")
    compiler, *flags = COMPILERS[language]
    command = [program(compiler), *flags, *STRICT, "-I", ROOT / "include", source, *options]
    run(*command, folder=folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_programs_run(page: Path, tmp_path: Path) -> None:
    """Run the programs in order and in one folder, because one may load what another saved."""
    library = build_folder() / "libioshape" / "libioshape.so"
    for number, (language, text) in enumerate(programs(page)):
        executable = tmp_path / f"program{number}"
        # "-x none" ends the language that was set for the text, because the library is no source.
        compile_text(language, text, tmp_path, "-x", "none", library, "-o", executable)
        run(executable, folder=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples_are_whole_programs(page: Path) -> None:
    """Check that each block is a whole program, because other blocks are not compiled."""
    assert blocks(page) == programs(page)


def test_the_reference_has_programs_in_both_languages() -> None:
    assert {language for language, _ in programs(API)} == {"c", "cpp"}


def test_every_environment_variable_is_described() -> None:
    assert "IOSHAPE_ENGINE" in variables()
    assert variables() <= names(described())


def test_every_class_is_described() -> None:
    text = code(HEADERS / "ioshape.hpp")
    classes = set(re.findall(r"^class (\w+)\s", text, re.MULTILINE))
    assert classes >= {"context", "reader"}
    assert classes <= set(re.findall(r"\bioshape::(\w+)", described()))


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "start.md"], ids=lambda path: path.name)
def test_code_of_the_first_pages_fits(page: Path) -> None:
    """Check the line length: the site has 90 columns on a screen of 1280 pixels."""
    text = page.read_text(encoding="utf-8")
    lines = [*re.findall(r"^    (\S.*)$", text, re.MULTILINE)]
    for block in re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines += block.expandtabs(8).splitlines()
    assert lines
    assert [line for line in lines if len(line) > 90] == []


def test_every_page_is_in_the_index() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[.*?\]\(([\w-]+\.md)\) \|", text, re.MULTILINE)
    assert sorted([*named, "index.md"]) == sorted(
        page.name for page in (ROOT / "docs").glob("*.md")
    )


def test_nothing_is_invented() -> None:
    known = names(headers() + code(HEADERS / "ioshape.hpp")) | variables()
    for page in (README, API, ROOT / "docs" / "groups.md"):
        told = names(page.read_text(encoding="utf-8"))
        invented = {name for name in told if re.match(r"ioshape_|IOSHAPE_", name)} - known
        # This is a target of CMake.
        assert invented <= {"ioshape_static"}, page
