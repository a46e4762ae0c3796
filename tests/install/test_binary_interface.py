# SPDX-License-Identifier: Apache-2.0
"""Test that bindings/packaging/abi.sh demands a new soname if old programs would break."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tree import ROOT

ABI = Path("bindings") / "packaging" / "abi.sh"


def compared(tree: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [tree / ABI, "HEAD"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these sources have no history")
@pytest.mark.skipif(
    shutil.which("abidiff") is None, reason="there is no abidiff; run tests/support/setup.sh launch"
)
def test_a_function_that_goes_takes_the_soname_with_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "-q", ROOT, tree], check=True)
    shutil.copy(ROOT / ABI, tree / ABI)
    change(tree / "libioshape" / "ioshape.map", "\t\tioshape_dtype_bytes;\n", "")
    done = compared(tree)
    assert done.returncode == 1, done.stdout
    assert "'function size_t ioshape_dtype_bytes(" in done.stdout
    assert "raise soname_version" in done.stdout
    change(tree / "meson.build", "soname_version = '1'", "soname_version = '2'")
    done = compared(tree)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.endswith(
        "soname libioshape.so.1 -> libioshape.so.2; programs of then need the old one"
    )
