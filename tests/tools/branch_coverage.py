# SPDX-License-Identifier: Apache-2.0
"""Writes the table of branch coverage in docs/testing.md: branch_coverage.py BUILD PYTHON_REPORT.

BUILD is a build folder whose tests have run with -Db_coverage=true. PYTHON_REPORT is the file that
pytest wrote with --cov-report=json.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"

Counts = tuple[str, int, int]  # file or folder, branches taken, branches in all


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


def row(what: str, taken: int, branches: int) -> str:
    # Rounded down: 89.9 is not 90.
    return f"| {what} | {branches:,} | {100 * taken // branches} % |"


def by_folder(files: Iterable[Counts]) -> Iterator[Counts]:
    for name, covered, branches in files:
        yield "/".join(name.split("/")[:2]), covered, branches


def whole_and_least(files: Iterable[Counts]) -> list[str]:
    """Return the rows that tests/bench/campaign.py reads."""
    counted = [
        (taken / branches, name, taken, branches) for name, taken, branches in files if branches
    ]
    taken, branches = sum(one[2] for one in counted), sum(one[3] for one in counted)
    _, lowest, its_taken, its_branches = min(counted)
    return [
        row("all of `libioshape`", taken, branches),
        row(f"least: `{lowest}`", its_taken, its_branches),
    ]


def python_branches(report: Path) -> Iterator[Counts]:
    for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
        inside = name.rpartition("site-packages/")[2].split("/")
        folder = "bindings/" + "/".join(inside[:-1][:2])
        summary = file["summary"]
        yield folder, summary["covered_branches"], summary["num_branches"]


def table(counts: Iterable[Counts]) -> list[str]:
    taken: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for folder, covered, branches in counts:
        taken[folder] += covered
        total[folder] += branches
    return [row(f"`{name}`", taken[name], total[name]) for name in sorted(total) if total[name]]


def main(build: Path, report: Path) -> None:
    head = ["| folder | branches | taken |", "|---|---|---|"]
    files = list(c_branches(build))
    rows = table(by_folder(files)) + whole_and_least(files) + table(python_branches(report))
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    text = "\n".join([BEGIN, *head, *rows, END])
    PAGE.write_text(before + text + after, encoding="utf-8")
    print(text)


main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
