# SPDX-License-Identifier: Apache-2.0
"""Test that the last line of tests/run.sh counts correctly."""

import json
from pathlib import Path

import pytest
from tally import Counts, count_command, count_meson_test, main

PYTEST_REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped/></testcase></testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("result", "stdout", "expected"),
    [
        ("OK", "1..2\nok 1 - a\nok 2 - b\n", Counts(passed=2)),
        ("OK", "1..2\nok 1 - a\nok 2 - b # SKIP no disk\n", Counts(passed=1, skipped=1)),
        ("FAIL", "1..2\nok 1 - a\nnot ok 2 - b\n", Counts(passed=1, failed=1)),
        ("ERROR", "1..9\nok 1 - a\n", Counts(passed=1, failed=1)),  # crashed after the first test
        ("TIMEOUT", "", Counts(failed=1)),
        ("FAIL", "1..1\nok 1 - a\n", Counts(passed=1, failed=1)),  # a leak was found at the end
        ("SKIP", "", Counts(skipped=1)),
        ("SKIP", "1..0 # SKIP no io_uring\n", Counts(skipped=1)),
        ("OK", "any text", Counts(passed=1)),
    ],
)
def test_meson_tests(result: str, stdout: str, expected: Counts) -> None:
    assert count_meson_test("name", result, stdout) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, Counts(passed=1)),
        (77, Counts(skipped=1)),
        (1, Counts(failed=1)),
        (139, Counts(failed=1)),
    ],
)
def test_checks(status: int, expected: Counts, tmp_path: Path) -> None:
    assert count_command("check", status, tmp_path) == expected


def test_pytest_reports(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(PYTEST_REPORT)
    assert count_command("pytest", 1, report) == Counts(passed=1, failed=2, skipped=1)


@pytest.mark.parametrize("kind", ["meson", "pytest"])
@pytest.mark.parametrize("status", [0, 2])
def test_a_command_without_results_has_failed(kind: str, status: int, tmp_path: Path) -> None:
    assert count_command(kind, status, tmp_path / "missing") == Counts(failed=1)


def test_a_status_outweighs_a_green_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"name": "a", "result": "OK", "stdout": "ok 1 - a\n"}) + "\n")
    assert count_command("meson", 1, report) == Counts(passed=1, failed=1)


def test_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.tsv").write_text("check\t0\t\tone\ncheck\t77\t\ttwo\n")
    assert main(tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 1 skipped"


def test_failed_tests_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.xml").write_text(PYTEST_REPORT)
    programs = [
        {"name": "io", "result": "FAIL", "stdout": "ok 1 - a\nnot ok 2 - b: 1 is not 2\n"},
        {"name": "slots", "result": "TIMEOUT", "stdout": "ok 1 - a\n"},
    ]
    (tmp_path / "report.json").write_text("\n".join(map(json.dumps, programs)))
    (tmp_path / "index.tsv").write_text(
        "meson\t1\treport.json\tC tests\npytest\t1\treport.xml\tPython tests\n"
    )
    assert main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "failed: C tests (2)",
        "    io 2 - b: 1 is not 2",
        "    slots: TIMEOUT",
        "failed: Python tests (2)",
        "    b",
        "    c",
        "3 passed, 4 failed, 1 skipped",
    ]


def test_nothing_tested_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 0 failed, 0 skipped"
