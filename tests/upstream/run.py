# SPDX-License-Identifier: Apache-2.0
"""Run a framework's own tests, unchanged, with the framework's own code and with ioshape.

Results of both are printed, and the tests that fail only with ioshape. If there are any, the exit
status is 1. The tests are fetched to a temporary folder, or taken from --source. The package of
this tree (tests/support/package.sh) and a package index are needed.

To add a framework, add a module NAME_tests.py with a FRAMEWORK here, and a plug-in for pytest if
needed. Usage:

    python -m tests.upstream.run safetensors
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.upstream.framework import Framework

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import frameworks  # noqa: E402 - found through the path above

NAMES = sorted(
    path.stem.removesuffix("_tests") for path in Path(__file__).parent.glob("*_tests.py")
)


class CannotTell(Exception):
    """The tests give no answer about ioshape."""


def outcomes(report: Path) -> dict[str, str]:
    """Return how each test in a report of pytest ended."""
    ended = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        how = "failed" if kinds & {"failure", "error"} else "passed"
        name = f"{case.get('classname')}.{case.get('name')}"
        ended[name] = "skipped" if "skipped" in kinds else how
    return ended


def run(framework: Framework, source: Path, work: Path, *, ours: bool) -> dict[str, str]:
    """Run the tests once. Their output is shown."""
    report = work / f"{'ours' if ours else 'stock'}.xml"
    trace = work / "trace"
    variables = {**os.environ, **dict(framework.environment), "TMPDIR": str(work)}
    # Tests must find the installed package, not that of the tree. The plug-ins are in the tree.
    variables["PYTHONPATH"] = str(ROOT) if framework.plugin else ""
    python, way = sys.executable, []
    if framework.installed_as:
        python = str(frameworks.environment(framework.installed_as))
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--rootdir", str(source)]
    if ours:
        variables["IOSHAPE_TRACE"] = str(trace)
        options += ["-p", framework.plugin] if framework.plugin else []
        way = [] if framework.plugin else ["-m", "ioshape", "run"]
    files = [str(source / file) for file in framework.files]
    subprocess.run(
        [python, *way, "-m", "pytest", *options, *framework.arguments, *files],
        cwd=source,
        env=variables,
        check=False,
    )
    if not report.exists():
        raise CannotTell(f"pytest has not come to run the tests of {framework.package}")
    if ours and not list(trace.glob("*.jsonl")):
        raise CannotTell(f"no test of {framework.package} has saved through us")
    return outcomes(report)


def table(package: str, stock: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return a table of both runs."""
    kinds = ("passed", "failed", "skipped")
    lines = [f"{package:<24}" + "".join(f"{kind:>9}" for kind in kinds)]
    for name, ended in (("stock", stock), ("ours", ours)):
        counts = Counter(ended.values())
        lines.append(f"{name:<24}" + "".join(f"{counts[kind]:>9}" for kind in kinds))
    return "\n".join(lines)


def worse(stock: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Return tests that fail or do not run only with ioshape."""
    return [name for name, how in stock.items() if how == "passed" != ours.get(name, "missing")]


def both(name: str, source: Path | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the outcomes of a framework's tests without and with ioshape."""
    framework: Framework = import_module(f"tests.upstream.{name}_tests").FRAMEWORK
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        work = Path(folder)
        if source is None:
            fetched = work / "fetched"
            fetched.mkdir()
            source = framework.fetch(fetched)
        stock = run(framework, source.resolve(), work, ours=False)
        return stock, run(framework, source.resolve(), work, ours=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("framework", choices=NAMES)
    parser.add_argument("--source", type=Path, help="where its tests are, instead of fetching them")
    arguments = parser.parse_args()
    try:
        stock, ours = both(arguments.framework, arguments.source)
    except CannotTell as problem:
        sys.exit(f"upstream: {problem}")
    found = worse(stock, ours)
    print()
    print(table(arguments.framework, stock, ours))
    for name in found:
        print(f"fails with us alone: {name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
