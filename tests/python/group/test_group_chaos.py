# SPDX-License-Identifier: Apache-2.0
"""Kills at random moments while ranks save together.

The campaign's kind `kills` plays more scenes.
"""

from pathlib import Path

import pytest
from group_chaos import Lane, Scene, lane, scenes


def check(made: Lane) -> None:
    told = made.verdict.told()
    assert not made.verdict.faults, told
    # A run without saves and loads could find no fault.
    assert told["counts"]["checkpoints"] > told["kills"] / 2, told
    assert told["counts"]["jobs_that_loaded"], told


@pytest.mark.long
def test_kills_at_random_moments(tmp_path: Path) -> None:
    with lane(tmp_path / "lane", 7) as made:
        waiting = scenes()
        made.random.shuffle(waiting)
        for scene in waiting[:3]:
            made.play(scene)
        for victim in ("member", "redis"):
            made.play(Scene("node", "async", "redis", victim))
        check(made)
