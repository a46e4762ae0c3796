# SPDX-License-Identifier: Apache-2.0
"""Test that the campaign's figures are what its trials counted."""

from pathlib import Path

import pytest

from tests.campaign import ledger, page
from tests.campaign.ledger import Mend, Slice
from tests.campaign.trial import Trial


def slice_of(kind: str, first: int, *trials: Trial) -> Slice:
    one = Slice(kind, "abc", first, first - 1)
    for seed, trial in enumerate(trials, first):
        one.add(seed, trial)
    return one


def test_counts_add_up_and_the_worst_stays() -> None:
    slices = [
        slice_of(
            "files",
            1,
            Trial({"bad_files": 40}, {"bad_seconds_max": 0.5}),
            Trial({"bad_files": 2}, {"bad_seconds_max": 0.7}),
        ),
        slice_of("files", 3, Trial({"bad_files": 1}, {"bad_seconds_max": 0.1})),
    ]
    assert ledger.figures(slices, []) == {
        "bad_files": 43,
        "bad_silent": 0,  # tried, none found
        "bad_seconds_max": 0.7,
    }


def test_what_was_found_counts_until_it_is_mended() -> None:
    bad = Trial(
        {"bad_files": 7, "bad_silent": 2}, {"bad_seconds_max": 9.0}, findings=["a file is wrong"]
    )
    good = Trial({"bad_files": 7}, {"bad_seconds_max": 1.0})
    slices = [slice_of("files", 5, good, bad, good)]
    assert ledger.figures(slices, []) == {
        "bad_files": 21,
        "bad_silent": 2,
        "bad_seconds_max": 9.0,
    }
    assert [found.seed for _, found in ledger.still_open(slices, [])] == [6]
    mends = [Mend("files", 6, "def", "mended")]
    assert ledger.figures(slices, mends) == {
        "bad_files": 21,
        "bad_silent": 0,
        "bad_seconds_max": 1.0,
    }
    # The fix is for another kind, or for another seed.
    for mend in Mend("fuzz", 6, "def", "mended"), Mend("files", 5, "def", "mended"):
        assert ledger.figures(slices, [mend])["bad_silent"] == 2


def test_nothing_is_wrong_without_a_word() -> None:
    with pytest.raises(ValueError, match="power_lost"):
        slice_of("power", 1, Trial({"power_images": 1, "power_lost": 1}))


def test_what_nobody_tried_has_no_figure() -> None:
    assert ledger.figures([], []) == {}


def test_the_next_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert ledger.next_seed(ledger.read(path), "kills") == 1
    slices = [
        slice_of("kills", 1, Trial(findings=["x"]), Trial({"kills": 2})),
        slice_of("power", 1, Trial()),
    ]
    for one in slices:
        ledger.append(one, path)
    assert ledger.read(path) == slices
    assert ledger.next_seed(slices, "kills") == 3
    assert ledger.next_seed(slices, "power") == 2
    assert ledger.next_seed(slices, "files") == 1


def test_the_page_says_what_the_ledger_says() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.renewed(text, ledger.read(), ledger.read_mended()) == text, (
        "run tests/campaign.sh --page"
    )


def test_mends_are_of_findings() -> None:
    found = {(one.kind, each.seed) for one in ledger.read() for each in one.findings}
    assert {(mend.kind, mend.seed) for mend in ledger.read_mended()} <= found
