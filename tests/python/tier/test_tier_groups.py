# SPDX-License-Identifier: Apache-2.0
"""Groups over a tier: checkpoints are durable on this host's disk, found there, and drained."""

import warnings
from pathlib import Path
from typing import Any

import ioshape
import pytest
from checkpoints import wait_until
from command import call, succeed
from nodes import run_ranks
from records import flip
from tiers import canonical, undrained

BEGIN = "from group_program import *\nimport warnings\n"


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    """Return the tier's folder."""
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return the directory of the checkpoints at the destination."""
    (tmp_path / "slow").mkdir()
    return tmp_path / "slow" / "runs"


def checkpoint(directory: Path, step: int) -> Path:
    return directory / f"step-{step:010}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps of all checkpoints, complete or not."""
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))


def command(fast: Path, *arguments: str) -> str:
    return succeed(call(*arguments, env={"IOSHAPE_TIER": str(fast)}))


def told(said: list[list[dict[str, Any]]], event: str) -> list[dict[str, Any]]:
    return [line for lines in said for line in lines if line["event"] == event]


# ---- Saves ---------------------------------------------------------------------------------------

SAVE = (
    BEGIN
    + """
directory, *steps = arguments
for step in map(int, steps):
    report = ioshape.save_group(object_of(rank, step), directory, step)
    say("saved", step=step, path=report.path, tier=report.tier,
        steps=[[one.code, one] for one in report.downgrades])
"""
)

LOAD = (
    BEGIN
    + """
for options in ({}, {"fallback": True}, {"step": int(arguments[1])}):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ioshape.load_group(arguments[0], **options)
    passed = [[one.message.path, [over.path for over in one.message.passed_over]]
              for one in caught if one.category is ioshape.FallbackWarning]
    say("loaded", right=is_right(found, rank, int(arguments[1])), passed=passed)
"""
)


REAL_RANKS = (
    BEGIN
    + """
set_up_distributed()
fast, directory = arguments
report = ioshape.save_group(
    object_of(rank, 2), directory, 2, durable="destination", tier=fast)
assert report.drain_s > 0 and is_right(ioshape.load_group(directory, tier=False), rank, 2)
for step in (3, 4, 5):
    report = ioshape.save_group(
        object_of(rank, step), directory, step, keep_last=1, keep_every=3, tier=fast)
    assert (report.tier, report.downgrades) == (fast, ()), report
handle = ioshape.save_group_async(
    object_of(rank, 8), directory, 8, keep_last=1, keep_every=3, tier=fast)
assert handle.wait() and handle.report.tier == fast
assert is_right(ioshape.load_group(directory, tier=fast), rank, 8)
assert handle.wait_drained(60) and handle.drained()
assert is_right(ioshape.load_group(directory, tier=False), rank, 8)
say("ended")
torch.distributed.destroy_process_group()
"""
)


@pytest.mark.slow
def test_real_ranks_save_over_a_tier_and_the_directory_keeps_the_last(
    tmp_path: Path, fast: Path, runs: Path
) -> None:
    said = run_ranks(tmp_path, REAL_RANKS, fast, runs)
    assert [lines[-1]["event"] for lines in said] == ["ended", "ended"]
    assert steps_in(runs) == [3, 8]
    # Retention on the tier follows the tier's own settings.
    assert steps_in(canonical(fast, runs)) == [2, 3, 4, 5, 8]
    for one in ioshape.checkpoints(runs):
        one.verify()


@pytest.mark.slow
def test_before_the_drain_a_checkpoint_is_found_on_the_tier_alone(
    tmp_path: Path, fast: Path, runs: Path
) -> None:
    near = canonical(fast, runs)
    settings = {"IOSHAPE_TIER": str(fast), "LEAVE_UNDRAINED": "1"}
    with undrained(fast):
        said = run_ranks(tmp_path, SAVE, runs, 1, 2, **settings)
        assert {(line["tier"], line["path"]) for line in told(said, "saved")} == {
            (str(fast), str(checkpoint(runs, step))) for step in (1, 2)
        }
        assert steps_in(runs) == []
        newest = ioshape.latest(runs, tier=fast)
        assert newest is not None
        assert (newest.step, newest.path) == (2, str(checkpoint(near, 2)))
        assert [one.step for one in ioshape.checkpoints(runs, tier=fast)] == [1, 2]
        assert ioshape.checkpoints(runs) == []
        assert ioshape.load_group(runs, step=1, rank=1, tier=fast)["step"] == 1
        said = run_ranks(tmp_path, LOAD, runs, 2, **settings)
        assert [line["right"] for line in told(said, "loaded")] == [True] * 6
        assert command(fast, "ls", str(runs)).count("on the tier") == 2
        assert command(fast, "ls", "--json", str(runs)).count('"state": "on the tier"') == 2
        command(fast, "verify", str(runs))
        command(fast, "extract", str(runs), "--rank", "1", "-o", str(tmp_path / "part.pt"))
        assert ioshape.load(tmp_path / "part.pt")["step"] == 2
    # A process that only loads drains the copies of the earlier processes, too.
    wait_until(lambda: steps_in(runs) == [1, 2], "they are drained")
    run_ranks(tmp_path, SAVE, runs, 3, IOSHAPE_TIER=str(fast))
    assert steps_in(runs) == [1, 2, 3]
    for one in ioshape.checkpoints(runs):
        one.verify()


def test_what_cannot_go_over_a_tier_is_saved_directly_and_says_so(
    tmp_path: Path, fast: Path, runs: Path
) -> None:
    fast.rmdir()
    said = run_ranks(tmp_path, SAVE, runs, 1, IOSHAPE_TIER=str(fast))
    for line in told(said, "saved"):
        assert line["tier"] == ""
        ((_code, why),) = [step for step in line["steps"] if step[0] == "tier"]
        assert why.startswith("saved directly, not on the tier: ")
        assert str(fast) in why
    assert steps_in(runs) == [1]
    (found,) = ioshape.checkpoints(runs, tier=fast)
    found.verify()


def test_only_the_destination_can_be_waited_for(fast: Path, runs: Path) -> None:
    with pytest.raises(ValueError, match="durable cannot be False"):
        ioshape.save_group({}, runs, 1, durable=False, tier=fast)  # type: ignore[arg-type]
    assert not runs.exists()


# ---- The nearest intact copy ---------------------------------------------------------------------


@pytest.mark.parametrize("damaged", ["manifest.json", "*.pt"])
@pytest.mark.parametrize("options", [{"step": 1}, {"fallback": True}])
def test_a_damaged_copy_is_passed_over_for_what_it_was_drained_to(
    fast: Path, runs: Path, damaged: str, options: dict[str, Any]
) -> None:
    ioshape.save_group_async({"step": 1}, runs, 1, tier=fast).wait_drained()
    near = checkpoint(canonical(fast, runs), 1)
    (file,) = near.glob(damaged)
    flip(file, file.stat().st_size // 2)
    with pytest.warns(ioshape.FallbackWarning) as caught:
        assert ioshape.load_group(runs, tier=fast, **options) == {"step": 1}
    (warning,) = (one.message for one in caught)
    assert isinstance(warning, ioshape.FallbackWarning)
    assert warning.path == str(checkpoint(runs, 1))
    (over,) = warning.passed_over
    assert str(near).startswith(over.path)
    assert ioshape.load_group(runs, tier=False) == {"step": 1}


def test_of_two_of_a_step_the_one_that_was_saved_last_is_loaded(fast: Path, runs: Path) -> None:
    with undrained(fast):
        ioshape.save_group("on the tier", runs, 1, tier=fast)
        assert ioshape.load_group(runs, step=1, tier=fast) == "on the tier"
        ioshape.save_group("directly", runs, 1, tier=False)
        for options in ({}, {"step": 1}, {"fallback": True}):
            assert ioshape.load_group(runs, tier=fast, **options) == "directly"
        assert ioshape.load_latest(runs, tier=fast) == "directly"
        (found,) = ioshape.checkpoints(runs, tier=fast)
        assert found.path == str(checkpoint(runs, 1))
        ioshape.save_group("on the tier again", runs, 1, tier=fast)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ioshape.load_latest(runs, tier=fast) == "on the tier again"
        assert ioshape.load_latest(runs) == "directly"
