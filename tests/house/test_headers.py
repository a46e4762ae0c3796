# SPDX-License-Identifier: Apache-2.0
"""Every public header can be the only one that a program includes."""

import subprocess
from pathlib import Path

import pytest
from tree import ROOT, program, sources

LANGUAGES = {
    "gcc C11": ["gcc", "-x", "c", "-std=c11", "-Wstrict-prototypes"],
    "clang C11": ["clang", "-x", "c", "-std=c11", "-Wstrict-prototypes"],
    "g++ C++17": ["g++", "-x", "c++", "-std=c++17", "-Wold-style-cast"],
    "clang++ C++17": ["clang++", "-x", "c++", "-std=c++17", "-Wold-style-cast"],
}
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wundef", "-Werror", "-fsyntax-only"]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("header", [path.name for path in sources("include")])
def test_header_compiles_alone(header: str, language: str, tmp_path: Path) -> None:
    if header.endswith(".hpp") and "C++" not in language:
        return
    compiler, *options = LANGUAGES[language]
    only = tmp_path / "only"
    # Twice: the guard must hold.
    only.write_text(f"#include <ioshape/{header}>\n#include <ioshape/{header}>\nint only_one;\n")
    done = subprocess.run(
        [program(compiler), *options, *STRICT, "-I", ROOT / "include", only],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
