# SPDX-License-Identifier: Apache-2.0
"""Make the tables of docs/reliability.md from the ledger."""

from collections.abc import Sequence
from pathlib import Path

from . import ledger
from .ledger import Mend, Slice

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign: begin -->", "<!-- campaign: end -->"
SIGNS = {">=": "at least", "<=": "at most"}


def table(*rows: Sequence[str]) -> list[str]:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|" + len(rows[0]) * "---|", *rest, ""]


def figure_rows(slices: Sequence[Slice], mended: Sequence[Mend]) -> list[tuple[str, ...]]:
    found = ledger.figures(slices, mended)
    return [
        (f"`{name}`", f"{found[name]:,}" if name in found else "not yet", f"{SIGNS[how]} {bound:,}")
        for name, (how, bound) in ledger.WANTED.items()
    ]


def kind_rows(slices: Sequence[Slice], mended: Sequence[Mend]) -> list[tuple[str, ...]]:
    open_ = [kind for kind, _ in ledger.still_open(slices, mended)]
    rows: list[tuple[str, ...]] = []
    for kind in sorted({one.kind for one in slices}):
        ours = [one for one in slices if one.kind == kind]
        seeds = f"{ours[0].first:,} to {ours[-1].last:,}"
        hours = f"{sum(one.seconds for one in ours) / 3600:.1f}"
        gone = sum(1 for mend in mended if mend.kind == kind)
        rows.append((f"`{kind}`", seeds, hours, ours[-1].commit, str(open_.count(kind)), str(gone)))
    return rows


def tables(slices: Sequence[Slice], mended: Sequence[Mend]) -> str:
    lines = table(("figure", "so far", "wanted"), *figure_rows(slices, mended))
    head = ("kind", "seeds", "hours", "latest commit", "open findings", "mended")
    lines += table(head, *kind_rows(slices, mended))
    rows = [(f"`{one.kind}`", str(one.seed), one.says, one.commit) for one in mended]
    lines += table(("kind", "seed", "what was found, and its mend", "commit"), *rows)
    return "\n".join(lines)


def renewed(page: str, slices: Sequence[Slice], mended: Sequence[Mend]) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(slices, mended)}{END}{rest.split(END)[1]}"


def rewrite() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(renewed(page, ledger.read(), ledger.read_mended()), encoding="utf-8")
