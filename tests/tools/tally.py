# SPDX-License-Identifier: Apache-2.0
"""Adds up the results of all stages of tests/run.sh.

The folder, an argument, contains index.tsv with one line for each command: its kind, exit status,
report (empty if it has none) and title. The exit status overrides the report: a command that failed
without a failed test in its report counts as one more failure.
"""

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

SKIPPED_STATUS = 77  # as in automake and meson
MOST_NAMES = 10

TAP_RESULT = re.compile(r"^(not )?ok\b([^\n]*)", re.MULTILINE)
TAP_SKIP = re.compile(r"#\s*skip", re.IGNORECASE)


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    #: names of the failed tests, with what they said
    failures: list[str] = field(default_factory=list, compare=False)

    def fail(self, name: str) -> None:
        self.failed += 1
        self.failures.append(name)

    def add(self, other: "Counts") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.failures += other.failures


def count_check(status: int) -> Counts:
    """Count a command that is a test itself."""
    return Counts(
        passed=int(status == 0),
        failed=int(status not in (0, SKIPPED_STATUS)),
        skipped=int(status == SKIPPED_STATUS),
    )


def count_meson_test(name: str, result: str, stdout: str) -> Counts:
    """Count a program: each line of TAP is a test; a program without TAP is one test."""
    counts = Counts()
    for negation, rest in TAP_RESULT.findall(stdout):
        if TAP_SKIP.search(rest):
            counts.skipped += 1
        elif negation:
            counts.fail(f"{name}{rest}")
        else:
            counts.passed += 1
    if result == "SKIP":
        counts.skipped += int(counts == Counts())
    elif result in ("OK", "EXPECTEDFAIL"):
        counts.passed += int(counts == Counts())
    elif not counts.failed:
        # It crashed, hung, leaked or stopped after the tests that it could report.
        counts.fail(f"{name}: {result}")
    return counts


def count_meson(report: Path) -> Counts:
    counts = Counts()
    for line in report.read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        counts.add(count_meson_test(test["name"], test["result"], test.get("stdout", "")))
    return counts


def count_pytest(report: Path) -> Counts:
    counts = Counts()
    for case in ET.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts.fail("::".join(filter(None, (case.get("classname"), case.get("name")))))
        elif case.find("skipped") is not None:
            counts.skipped += 1
        else:
            counts.passed += 1
    return counts


def count_command(kind: str, status: int, report: Path) -> Counts:
    if kind == "check":
        return count_check(status)
    count = {"meson": count_meson, "pytest": count_pytest}[kind]
    counts = count(report) if report.is_file() else Counts()
    if status != 0:
        counts.failed += int(counts.failed == 0)
    elif counts == Counts():
        counts.failed += 1  # a command that succeeded without any result has tested nothing
    return counts


def main(folder: Path) -> int:
    total = Counts()
    index = folder / "index.tsv"
    lines = index.read_text(encoding="utf-8").splitlines() if index.exists() else []
    for line in lines:
        kind, status, report, title = line.split("\t")
        counts = count_command(kind, int(status), folder / report)
        total.add(counts)
        if counts.failed:
            print(f"failed: {title} ({counts.failed})")
        for name in counts.failures[:MOST_NAMES]:
            print(f"    {name}")
    if total == Counts():
        print("no test has run")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return int(total.failed > 0 or total == Counts())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
