# SPDX-License-Identifier: Apache-2.0
"""Writes the table of branch coverage in docs/testing.md: branch_coverage.py BUILD PYTHON_REPORT.

BUILD is a build folder whose tests have run with -Db_coverage=true; PYTHON_REPORT is what pytest
wrote with --cov-report=json.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"

Counts = tuple[str, int, int]  # of which folder; branches taken, branches there are


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
        folder = "/".join(file["filename"].split("/")[:2])
        yield folder, file["branch_covered"], file["branch_total"]


def python_branches(report: Path) -> Iterator[Counts]:
    for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        inside = name.rpartition("site-packages/")[2].split("/")
        folder = "bindings/" + "/".join(inside[:-1][:2])
        summary = file["summary"]
        yield folder, summary["covered_branches"], summary["num_branches"]


def table(counts: Iterator[Counts]) -> list[str]:
    taken: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for folder, covered, branches in counts:
        taken[folder] += covered
        total[folder] += branches
    return [
        f"| `{folder}` | {total[folder]:,} | {100 * taken[folder] / total[folder]:.0f} % |"
        for folder in sorted(total)
        if total[folder]
    ]


def main(build: Path, report: Path) -> None:
    head = ["| folder | branches | taken |", "|---|---|---|"]
    rows = table(c_branches(build)) + table(python_branches(report))
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    text = "\n".join([BEGIN, *head, *rows, END])
    PAGE.write_text(before + text + after, encoding="utf-8")
    print(text)


main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
