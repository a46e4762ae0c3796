# SPDX-License-Identifier: Apache-2.0
"""Report results of the fault campaign, read from its ledger and from the table of coverage."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

from tests.campaign import ledger

from .setting import Figure, Outcome, Setting

TESTING = Path(__file__).resolve().parents[2] / "docs/testing.md"
# Rows that tests/tools/branch_coverage.py writes: the whole library, and the file with the least
# coverage.
BRANCHES = {
    "branch_percent": (re.compile(r"^\| all of `libioshape` \| ([\d,]+) \| (\d+) % \|$", re.M), 90),
    "branch_percent_lowest": (
        re.compile(r"^\| least: `([^`]+)` \| [\d,]+ \| (\d+) % \|$", re.M),
        80,
    ),
}


def branch_figures(outcome: Outcome) -> Iterator[Figure]:
    text = TESTING.read_text(encoding="utf-8")
    for name, (row, least) in BRANCHES.items():
        found = row.search(text)
        if found:
            yield Figure(name, float(found[2]), ">=", least, found[1])
        else:
            outcome.ceilings.append(f"{name}: not measured; run tests/run.sh coverage")


def measure(setting: Setting) -> Outcome:
    del setting  # reading the ledger depends on no setting
    outcome = Outcome()
    slices, mended = ledger.read(), ledger.read_mended()
    found = ledger.figures(slices, mended)
    for name, (how, bound) in ledger.WANTED.items():
        if name in found:
            relation = cast(Literal[">=", "<="], how)
            outcome.figures.append(Figure(name, found[name], relation, bound, "of the ledger"))
        else:
            outcome.ceilings.append(f"{name}: not measured; run tests/campaign.sh")
    outcome.figures += branch_figures(outcome)
    open_ = ledger.still_open(slices, mended)
    outcome.ceilings += [f"open: {kind}, seed {one.seed}: {one.says[0]}" for kind, one in open_]
    outcome.facts["slices"] = len(slices)
    return outcome
