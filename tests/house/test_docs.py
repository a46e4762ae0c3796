# SPDX-License-Identifier: Apache-2.0
"""The pages tell the truth: programs run, prototypes are the headers', nothing is missing."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tree import HEADERS, LIBRARY, ROOT, build_folder, code, program

API = ROOT / "docs" / "api.md"
README = ROOT / "README.md"
TUNING = ROOT / "docs" / "tuning.md"
PAGES = [API, ROOT / "docs" / "groups.md", README]

COMPILERS = {
    "c": ["cc", "-x", "c", "-std=c11", "-Wstrict-prototypes"],
    "cpp": ["c++", "-x", "c++", "-std=c++17"],
}
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]

BLOCK = re.compile(r"^```(c|cpp)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAIN = re.compile(r"\bint main\(")
STRUCT = re.compile(r"\bstruct (ioshape_\w+) \{(.*?)\n\};", re.DOTALL)
ENUM = re.compile(r"\benum ioshape_\w+ \{(.*?)\n\};", re.DOTALL)
# Of a declaration the last name: "double stage_s", "char engine[16]", "const int64_t *shape".
FIELD = re.compile(r"(\w+)\s*(?:\[\w+\])?;")
MACRO = re.compile(r"^#define (IOSHAPE_\w+)", re.MULTILINE)
VARIABLE = re.compile(r'"(IOSHAPE_\w+)"')


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each block of C or C++."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def programs(page: Path) -> list[tuple[str, str]]:
    return [(language, text) for language, text in blocks(page) if MAIN.search(text)]


def headers() -> str:
    return "\n".join(code(path) for path in sorted(HEADERS.glob("*.h")))


def functions() -> set[str]:
    return set(re.findall(r"\b(ioshape_\w+);", code(LIBRARY / "ioshape.map")))


def variables() -> set[str]:
    files = ("context.c", "group.c", "slot.c", "slot_options.c", "storage_options.c")
    places = [LIBRARY / "ckpt" / name for name in files]
    return {name for place in places for name in VARIABLE.findall(code(place))}


def constants() -> set[str]:
    """Values of enums, and macros but for the headers' guards."""
    text = headers()
    values = {name for body in ENUM.findall(text) for name in re.findall(r"\bIOSHAPE_\w+", body)}
    return values | {name for name in MACRO.findall(text) if not name.endswith("_H")}


def described() -> str:
    """What the reference says in its own words and tables, not in programs."""
    return BLOCK.sub(keep_prototypes, API.read_text(encoding="utf-8"))


def keep_prototypes(block: re.Match[str]) -> str:
    return "" if MAIN.search(block[2]) else block[2]


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
    """In the order of the page and in one folder: a later one may load what another saved."""
    library = build_folder() / "libioshape" / "libioshape.so"
    for number, (language, text) in enumerate(programs(page)):
        executable = tmp_path / f"program{number}"
        # The language of the text is not that of the library.
        compile_text(language, text, tmp_path, "-x", "none", library, "-o", executable)
        run(executable, folder=tmp_path)


def test_the_reference_has_programs_in_both_languages() -> None:
    assert {language for language, _ in programs(API)} == {"c", "cpp"}


def test_prototypes_are_those_of_the_headers(tmp_path: Path) -> None:
    # Declaring a function or a type again is allowed if it is the same one.
    parts = [text for language, text in blocks(API) if language == "c" and not MAIN.search(text)]
    text = "\n".join(["#include <ioshape/ioshape.h>", *parts])
    compile_text("c", text, tmp_path, "-fsyntax-only")


def test_every_function_has_its_prototype() -> None:
    assert functions()
    prototypes = "\n".join(text for _, text in blocks(API) if not MAIN.search(text))
    declared = set(re.findall(r"\b(ioshape_\w+)\(", prototypes))
    assert declared == functions()


def test_every_environment_variable_is_described() -> None:
    assert "IOSHAPE_ENGINE" in variables()
    assert variables() <= names(described())


def test_every_constant_is_described() -> None:
    assert "IOSHAPE_FLOAT32" in constants()
    assert constants() <= names(described())


def test_every_struct_and_its_fields_are_described() -> None:
    structs = STRUCT.findall(headers())
    assert "ioshape_report" in {name for name, _ in structs}
    for name, body in structs:
        fields = set(FIELD.findall(body))
        assert fields, name
        assert {name, *fields} <= names(described()), name


def test_every_class_is_described() -> None:
    text = code(HEADERS / "ioshape.hpp")
    classes = set(re.findall(r"^class (\w+)\s", text, re.MULTILINE))
    assert classes >= {"context", "reader"}
    assert classes <= set(re.findall(r"\bioshape::(\w+)", described()))


def test_every_page_is_in_the_readme() -> None:
    """In its table of pages: a link in passing is not where somebody looks for it."""
    rows = re.findall(r"^\| `(docs/.*?)\s\|", README.read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"docs/[\w-]+\.md", "\n".join(rows)))
    assert named == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


def test_every_filesystem_is_in_the_tuning_page() -> None:
    rows = re.findall(
        r"^\| \[.*?\]\((filesystems/.*?)\)", TUNING.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(rows) == {f"filesystems/{p.name}" for p in (ROOT / "docs/filesystems").glob("*.md")}


def test_nothing_is_invented() -> None:
    known = names(headers() + code(HEADERS / "ioshape.hpp")) | variables()
    for page in PAGES:
        told = names(page.read_text(encoding="utf-8"))
        invented = {name for name in told if re.match(r"ioshape_|IOSHAPE_", name)} - known
        # A package and a target of CMake.
        assert invented <= {"ioshape_static"}, page
