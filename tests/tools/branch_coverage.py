# SPDX-License-Identifier: Apache-2.0
"""Writes the branch coverage in docs/testing.md: branch_coverage.py BUILD PYTHON_REPORT.

BUILD is a build folder whose tests have run with -Db_coverage=true. PYTHON_REPORT is the file that
pytest wrote with --cov-report=json.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"

Counts = tuple[str, int, int]  # file, branches taken, branches in all


def c_branches(build: Path) -> Iterator[Counts]:
    done = subprocess.run(
        [
            "gcovr",
            "--root",
            str(ROOT),
            "--filter",
            "libioshape/",
            "--json-summary",
            "-",
            str(build),
        ],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    for file in json.loads(done.stdout)["files"]:
        yield file["filename"], file["branch_covered"], file["branch_total"]


def share(taken: int, branches: int) -> str:
    # Rounded down: 89.9 is not 90.
    return f"{100 * taken // branches} %"


def whole(what: str, files: list[Counts]) -> str:
    """Return the sum of all files."""
    taken, branches = sum(one[1] for one in files), sum(one[2] for one in files)
    return f"- `{what}`: {share(taken, branches)} of {branches:,} branches"


def least(files: list[Counts]) -> str:
    """Return the file with the smallest share."""
    name, taken, branches = min((one for one in files if one[2]), key=lambda one: one[1] / one[2])
    return f"; the least of a file is {share(taken, branches)} (`{name}`)"


def python_branches(report: Path) -> Iterator[Counts]:
    for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        summary = file["summary"]
        yield name, summary["covered_branches"], summary["num_branches"]


def main(build: Path, report: Path) -> None:
    files = list(c_branches(build))
    lines = [
        whole("libioshape", files) + least(files),
        whole("bindings", list(python_branches(report))),
    ]
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    text = "\n".join([BEGIN, *lines, END])
    PAGE.write_text(before + text + after, encoding="utf-8")
    print(text)


main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
