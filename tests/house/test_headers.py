# SPDX-License-Identifier: Apache-2.0
"""Test that every public header compiles as the only include of a program."""

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


def mpi_options() -> list[str]:
    """Return options for mpi.h, which includes MPI's header. Warnings in that are ignored."""
    done = subprocess.run(
        [program("pkg-config"), "--cflags-only-I", "ompi-c"],
        capture_output=True,
        text=True,
        check=True,
    )
    folders = [option.removeprefix("-I") for option in done.stdout.split()]
    # Leaves out the C++ interface of MPI 2, which was removed from the standard.
    return ["-DOMPI_SKIP_MPICXX", *(f"-isystem{folder}" for folder in folders)]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("header", [path.name for path in sources("include")])
def test_header_compiles_alone(header: str, language: str, tmp_path: Path) -> None:
    if header.endswith(".hpp") and "C++" not in language:
        return
    compiler, *options = LANGUAGES[language]
    if header == "mpi.h":
        options += mpi_options()
    only = tmp_path / "only"
    # It is included twice to test its guard.
    only.write_text(f"#include <ioshape/{header}>\n#include <ioshape/{header}>\nint only_one;\n")
    done = subprocess.run(
        [program(compiler), *options, *STRICT, "-I", ROOT / "include", only],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
