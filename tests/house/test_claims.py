# SPDX-License-Identifier: Apache-2.0
"""Each claim of the README has a test or a benchmark that holds it: tests/tools/claims.py."""

import claims


def test_each_claim_is_held() -> None:
    assert len(list(claims.claims())) > 10
    assert claims.unproved() == []


def test_nothing_is_held_that_is_not_claimed() -> None:
    assert [
        start
        for start in claims.HELD_BY
        if not any(claim.startswith(start) for claim in claims.claims())
    ] == []
