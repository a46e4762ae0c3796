# SPDX-License-Identifier: Apache-2.0
"""Count prose that is hard to read in comments, docstrings and pages of the product."""

import claims
import english
from tree import ROOT

from .setting import Figure, Outcome, Setting

MOST = {
    "fragment_docstrings": 0,
    "riddle_words": 0,
    "long_sentences": 0,
    "names_with_two_meanings": 0,
}
REMARKS = {
    "fragment_docstrings": "percent of the product's descriptions",
    "riddle_words": "such as nobody and whoever, in the product and its pages",
    "long_sentences": f"of over {english.MOST_WORDS} words in pages, headers and docstrings",
    "names_with_two_meanings": "lines of product and pages with a retired word",
}


def lines_of(*patterns: str) -> list[int]:
    return [
        len(path.read_text(encoding="utf-8").splitlines())
        for pattern in patterns
        for path in ROOT.glob(pattern)
    ]


def measure(setting: Setting) -> Outcome:
    del setting  # counting depends on no setting
    outcome = Outcome()
    found = english.figures()
    for name, most in MOST.items():
        outcome.figures.append(Figure(name, found[name], "<=", most, REMARKS[name]))
    pages = lines_of("docs/**/*.md")
    for name, value, most in (
        ("readme_lines", sum(lines_of("README.md")), 120),
        ("pages", len(pages), 32),
        ("page_lines", sum(pages), 6_000),
    ):
        outcome.figures.append(Figure(name, value, "<=", most, "of README.md and docs"))
    unproved = claims.unproved()
    remark = "; ".join(unproved) or "of README.md have a test or a figure"
    outcome.figures.append(Figure("unproved_claims", len(unproved), "<=", 0, remark))
    outcome.facts["tests"] = {name: found[name] for name in found if name not in MOST}
    return outcome
