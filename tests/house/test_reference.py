# SPDX-License-Identifier: Apache-2.0
"""Test that the reference made from the headers is complete, and that gaps are refused."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tree import HEADERS, LIBRARY, ROOT, build_folder, code, program

MAKER = ROOT / "docs" / "make_reference.py"
PAGES = build_folder() / "include" / "man3"


def make(folder: Path, header: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, MAKER, "1.2.3", folder, header],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_function_has_a_page() -> None:
    maps = code(LIBRARY / "ioshape.map") + code(LIBRARY / "tier" / "tier.map")
    functions = set(re.findall(r"\b(ioshape_\w+);", maps))
    assert functions <= {page.stem for page in PAGES.glob("*.3")}


def test_pages_of_functions_list_the_options() -> None:
    headers = "".join(code(path) for path in HEADERS.glob("*.h"))
    taken = re.findall(
        r"\b(ioshape_\w+)\((?:[^;]*?\bstruct (ioshape_\w+_options) \*)[^;]*;", headers
    )
    assert ("ioshape_slot_acquire", "ioshape_slot_options") in taken
    for function, options in taken:
        page = (PAGES / f"{function}.3").read_text(encoding="utf-8")
        assert f"\nstruct {options} {{\n\tsize_t size; " in page, function
        assert f"#define {options.upper()}_INIT " in headers, options


def test_pages_are_free_of_warnings() -> None:
    pages = [*PAGES.glob("*.3"), *PAGES.parent.glob("man[17]/ioshape.*")]
    assert {page.name for page in pages} >= {"ioshape.1", "ioshape.7"}
    done = subprocess.run(
        [program("groff"), "-man", "-ww", "-z", "-Tutf8", *pages],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("comment", "declaration"),
    [
        ("", "int ioshape_new(int a);"),
        ("/* It does. */", "int ioshape_new(int a);"),
        ("/**\n * It does.\n *\n * @return 0\n */", "int ioshape_new(int a);"),
        ("/**\n * It does.\n *\n * @param a  one\n */", "int ioshape_new(int a);"),
        ("/**\n * It does.\n *\n * @param b  one\n * @return 0\n */", "int ioshape_new(int a);"),
        ("", "struct ioshape_new {\n\tint a;\n};"),
        ("", "enum ioshape_new {\n\tIOSHAPE_A\n};"),
        ("", "typedef int (*ioshape_new_fn)(int a);"),
    ],
)
def test_what_says_too_little_is_refused(comment: str, declaration: str, tmp_path: Path) -> None:
    header = tmp_path / "new.h"
    header.write_text(f"/* A header. */\n{comment}\n{declaration}\n", encoding="utf-8")
    done = make(tmp_path / "pages", header)
    assert done.returncode == 1
    assert "ioshape_new" in done.stderr
    header.write_text((HEADERS / "ioshape.h").read_text(encoding="utf-8"), encoding="utf-8")
    assert make(tmp_path / "pages", header).returncode == 0
