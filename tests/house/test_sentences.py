# SPDX-License-Identifier: Apache-2.0
"""Test that docs/api.md lists exactly the report messages that the library writes."""

import re

from tree import HEADERS, LIBRARY, ROOT

STRING = r'"(?:[^"\\]|\\.)*"'
LITERAL = re.compile(rf"{STRING}(?:\s*(?:[A-Z][A-Z_]+\s*)?{STRING})*")
PLACEHOLDER = re.compile(r"%[-.\d*]*[hlzj]*[a-zA-Z]")
NOTE = re.compile(
    rf"\bio_add_downgrade\([^,]+,\s*(?:\(enum \w+\))?\s*(IOSHAPE_DOWNGRADE_\w+),\s*"
    rf"({LITERAL.pattern})"
)
ROW = re.compile(r"^\| `(IOSHAPE_DOWNGRADE_\w+)` \| (.*) \|$", re.MULTILINE)


def as_shown(literal: str) -> str:
    """Return a format as pages show it, with `…` for values."""
    text = re.sub(r'"\s*"', "", literal).strip('"')
    return PLACEHOLDER.sub("…", text).replace("……", "…").replace("%%", "%")


def documented() -> dict[str, list[str]]:
    """Return the messages of the table by code, without the explanations."""
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    section = section.partition("\n## The report\n")[2].partition("\n## ")[0]
    return {
        code: [one for one in re.findall(r"`([^`]+)`", text) if " " in one]
        for code, text in ROW.findall(section)
    }


def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(LIBRARY.rglob("*.c"))]


def test_every_code_is_documented_once() -> None:
    headers = "".join(path.read_text(encoding="utf-8") for path in HEADERS.glob("*.h"))
    codes = re.findall(r"^\s(IOSHAPE_DOWNGRADE_\w+) ?=", headers, re.MULTILINE)
    assert len(codes) >= 13
    assert sorted(documented()) == sorted(codes)


def test_the_library_writes_every_documented_sentence() -> None:
    shown = [as_shown(one) for text in sources() for one in LITERAL.findall(text)]
    told = [sentence for sentences in documented().values() for sentence in sentences]
    assert len(told) >= 20
    absent = [
        sentence
        for sentence in told
        if not any(one.startswith(sentence.removesuffix("…")) for one in shown)
    ]
    assert absent == []


def test_every_sentence_of_the_library_is_documented() -> None:
    table = documented()
    notes = [(code, as_shown(text)) for source in sources() for code, text in NOTE.findall(source)]
    assert len(notes) >= 12
    passed_on = "…"
    missing = [
        (code, sentence)
        for code, sentence in notes
        if sentence != passed_on and sentence not in table[code]
    ]
    assert missing == []
