# SPDX-License-Identifier: Apache-2.0
"""Test that tests/bench.sh lists every benchmark, and that benchmarks declare their needs."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from tree import ROOT, program

from tests.bench.__main__ import BENCHMARKS

SCRIPT = ROOT / "tests" / "bench.sh"
SETUP = (ROOT / "tests" / "support" / "setup.sh").read_text(encoding="utf-8")
USAGE, COMMANDS = re.split(r"^END$", SCRIPT.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)
LISTED = re.findall(r"^  ([a-z]\w*) ", USAGE, re.MULTILINE)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_usage_lists_the_benchmarks_that_exist() -> None:
    assert sorted(LISTED) == sorted(BENCHMARKS)


def test_the_guide_lists_the_benchmarks_that_exist() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `tests/bench` \|.*$", guide, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(BENCHMARKS)


def test_needs_are_purposes_of_the_setup() -> None:
    (purposes,) = re.findall(r"^([\w |]+)\) purpose=", SETUP, re.MULTILINE)
    declared = {purpose for one in BENCHMARKS.values() for purpose in one.needs}
    assert declared <= set(purposes.split(" | "))


def test_the_script_prepares_the_same_for_every_benchmark() -> None:
    words = set(re.findall(r"\w+", re.sub(r"^\s*#.*", "", COMMANDS, flags=re.MULTILINE)))
    assert words & set(BENCHMARKS) == set()


def test_the_build_of_the_benchmarks_has_every_program_that_they_start(tmp_path: Path) -> None:
    folders = (ROOT / "tests/bench", ROOT / "tests/support")
    texts = [path.read_text(encoding="utf-8") for one in folders for path in one.rglob("*.py")]
    started = set(
        re.findall(r'build_folder\(\) / "tests" /(?: "\w+" /)* "([\w-]+)"', "".join(texts))
    )
    assert started >= {"chaos-client", "depth", "requests", "stripefs"}
    meson: list[str | Path] = [program("meson"), "setup", "-Dbench=true", tmp_path, ROOT]
    subprocess.run(meson, check=True, capture_output=True, timeout=300)
    found = subprocess.run(
        [program("meson"), "introspect", "--targets", tmp_path],
        check=True,
        capture_output=True,
        timeout=300,
    )
    assert started <= {target["name"] for target in json.loads(found.stdout)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name at least one benchmark"),
        (("save", "sav"), "there is no benchmark sav;"),
        (("--rounds",), "--rounds needs a value"),
    ],
    ids=["none", "unknown", "no value"],
)
def test_a_mistake_is_refused_before_anything_is_built(
    arguments: tuple[str, ...], sentence: str
) -> None:
    done = bench(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert sentence in done.stderr


def test_the_usage_is_printed_on_request() -> None:
    done = bench("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(re.search(rf"^  {name} ", done.stdout, re.MULTILINE) for name in BENCHMARKS)
