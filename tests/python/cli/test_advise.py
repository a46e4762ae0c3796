# SPDX-License-Identifier: Apache-2.0
"""`ioshape advise`: the interval between checkpoints that loses the least time."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from command import call, fail, succeed
from hypothesis import given, settings
from hypothesis import strategies as st
from ioshape._cli import reports
from ioshape._cli.advise import Costs, observe

MTBF = st.floats(60, 1e7)
SECONDS = st.floats(0.001, 3600)


def lost_in_trial(costs: Costs, interval: float, failures: int, seed: int = 1) -> float:
    """Return the lost share of a simulated job that trains, saves and fails at random."""
    random = Random(seed)
    kept = passed = 0.0
    for _ in range(failures):
        life = random.expovariate(1 / costs.mtbf)
        done = at = 0.0
        while True:
            at += interval
            done += interval
            if at + costs.save > life:
                break
            kept += interval  # the save is durable in time, and training went on after the stall
            at += costs.stall
        restart = costs.restart
        while (survives := random.expovariate(1 / costs.mtbf)) < restart:
            passed += survives
        passed += life + restart
    return 1 - kept / passed


@pytest.mark.parametrize(
    "costs",
    [
        Costs(3600, 5, 5),
        Costs(3600, 60, 60, 120),
        Costs(10_000, 0.5, 40, 300),
        Costs(600, 30, 200, 60),
        Costs(100_000, 1, 1200, 600),
    ],
)
def test_losses_are_those_of_a_trial(costs: Costs) -> None:
    for factor in (1, 2):
        interval = costs.best * factor
        tried = lost_in_trial(costs, interval, 40_000)
        assert costs.lost(interval) == pytest.approx(tried, rel=0.03)


@given(MTBF, SECONDS, SECONDS, SECONDS)
@settings(max_examples=300)
def test_nothing_loses_less(mtbf: float, stall: float, more: float, restart: float) -> None:
    costs = Costs(mtbf, stall, stall + more, restart)
    assert costs.best > 0
    for factor in (0.5, 0.8, 0.99, 1.01, 1.3, 3):
        interval = costs.best * factor
        if interval >= costs.shortest:
            assert costs.lost(costs.best) <= costs.lost(interval) + 1e-9


@given(MTBF, SECONDS, st.floats(1, 10))
def test_the_interval_rises_with_cost_and_with_time_between_failures(
    mtbf: float, stall: float, factor: float
) -> None:
    costs = Costs(mtbf, stall, stall)
    assert Costs(mtbf, stall * factor, stall * factor).best >= costs.best * (1 - 1e-9)
    assert Costs(mtbf * factor, stall, stall).best >= costs.best * (1 - 1e-9)
    assert costs.lost(costs.best) <= Costs(mtbf, stall * factor, stall * factor).lost(costs.best)


@given(st.floats(1e4, 1e7))
def test_small_costs_are_young(mtbf: float) -> None:
    costs = Costs(mtbf, mtbf * 1e-6, mtbf * 1e-6)
    assert costs.best == pytest.approx(costs.young, rel=0.01)
    free = Costs(mtbf, 0, 0)
    assert free.best == 0
    assert free.lost(free.best) == pytest.approx(0, abs=1e-9)


def test_a_save_is_durable_before_the_next_one_begins() -> None:
    costs = Costs(36_000, 0.01, 900)
    assert costs.unbounded < costs.best == costs.shortest == 900 - 0.01
    # The stall counts, not the whole save: blocking saves need longer intervals.
    assert Costs(36_000, 1, 20).best < Costs(36_000, 20, 20).best


def test_costs_beyond_the_time_between_failures() -> None:
    costs = Costs(100, 400, 400, 400)
    assert math.isfinite(costs.best)
    assert costs.best < costs.mtbf
    assert 0.99 < costs.lost(costs.best) <= 1


# ---- Reports of a run ----------------------------------------------------------------------------


def line(rank: int, pid: int, at: float, **fields: Any) -> str:
    basis = {"ioshape": "save", "host": f"n{rank}", "rank": rank, "pid": pid, "started_s": at}
    return json.dumps({**basis, "background": True, "stage_s": 0.5, "total_s": 8.0, **fields})


def write_run(folder: Path) -> Path:
    """Write the reports of two ranks: five saves, 100 s apart, before and after a restart."""
    lines = []
    for life, began in ((0, 1e9), (1, 1e9 + 1000)):
        for step in range(5):
            at = began + 100 * step
            lines.append(line(0, 10 + life, at, slot_s=2.0))
            lines.append(line(1, 20 + life, at + 1, stage_s=1.5, slot_s=4.0, total_s=9.0))
    # An incomplete checkpoint must not change the figures of the complete ones.
    lines.append(line(0, 11, 1e9 + 1500, total_s=300.0))
    lines.append(line(1, 21, 1e9 + 1500, total_s=1.0, error="no space"))
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def test_observed(tmp_path: Path) -> None:
    found = observe(reports.read(write_run(tmp_path / "run")).saves)
    assert found
    assert (found.storms, found.restarts) == (10, 1)
    # The save lasts from the first rank's begin to the last rank's end. Stall and wait are the
    # longest of a rank.
    assert (found.save, found.stall, found.wait) == pytest.approx((10, 1.5, 4))
    assert found.interval == pytest.approx(98.5)
    assert found.mtbf == pytest.approx(1800)


# ---- The command ---------------------------------------------------------------------------------


def advice(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeed(call("advise", *arguments, "--json")))
    return found


def test_from_options() -> None:
    found = advice("--mtbf", "3h", "--save-seconds", "40", "--stall-seconds", "1.5")
    costs = Costs(3 * 3600, 1.5, 40)
    assert found["interval_s"] == pytest.approx(costs.best)
    assert found["lost"] == pytest.approx(costs.lost(costs.best))
    assert (found["bound_by"], found["observed"]) == ("failures", None)
    # Without --stall-seconds a save blocks. A job's MTBF is that of a node divided by the nodes.
    found = advice("--mtbf", "100d", "--nodes", "800", "--save-seconds", "40s")
    assert found["mtbf_s"] == 3 * 3600
    assert found["interval_s"] == pytest.approx(Costs(3 * 3600, 40, 40).best)
    text = succeed(call("advise", "--mtbf", "3h", "--save-seconds", "40"))
    assert text.count("\n") >= 6


def test_from_reports(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    found = advice(folder)
    assert found["interval_s"] == pytest.approx(Costs(1800, 1.5, 10).best)
    assert found["observed"]["interval_s"] == pytest.approx(98.5)
    assert found["wait_s"] == 4
    found = advice(folder, "--mtbf", "20h", "--restart-seconds", "5m")
    assert found["mtbf_s"] == 20 * 3600
    assert found["lost"] == pytest.approx(Costs(72_000, 1.5, 10, 300).lost(found["interval_s"]))
    assert "now" in succeed(call("advise", folder))


def test_bound_by_saves() -> None:
    found = advice("--mtbf", "3h", "--save-seconds", "20m", "--stall-seconds", "0.1")
    assert (found["bound_by"], found["interval_s"]) == ("saves", pytest.approx(1199.9))


def test_what_cannot_be_advised(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.jsonl").write_text(line(0, 1, 1e9, error="no space"))
    for arguments, code in (
        ([], 2),
        (["--mtbf", "0", "--save-seconds", "3"], 2),
        (["--mtbf", "3x", "--save-seconds", "3"], 2),
        (["--mtbf", "1e400h", "--save-seconds", "3"], 2),
        (["--save-seconds", "3"], 2),
        (["--nodes", "3", "--save-seconds", "3"], 2),
        (["--mtbf", "3h"], 2),
        (["--mtbf", "3h", str(tmp_path / "nothere")], 1),
        (["--mtbf", "3h", str(empty)], 1),
    ):
        fail(call("advise", *arguments), code)


def blocking(at: float, path: str, total_s: float = 0.2, **fields: Any) -> str:
    return line(0, 7, at, path=path, total_s=total_s, stage_s=0.0, background=False, **fields)


def observed(folder: Path, lines: list[str]) -> Any:
    (folder / "run.jsonl").write_text("\n".join(lines))
    return observe(reports.read(folder).saves)


def test_saves_that_block_are_told_apart_however_close_they_are(tmp_path: Path) -> None:
    """Check that close saves do not look like one background save of many ranks."""
    lines = [blocking(1e9 + 0.4 * step, f"run/step-{step}.pt") for step in range(9)]
    found = observed(tmp_path, lines)
    assert found.storms == 9
    assert found.stall == found.save == pytest.approx(0.2)
    assert found.interval == pytest.approx(0.2)
    told = succeed(call("advise", tmp_path, "--mtbf", "8h"))
    assert "Based on 9 checkpoints" in told
    assert "Training continues while the save is written" not in told


@pytest.mark.parametrize(
    "names",
    [("model-{}.pt", "optimizer-{}.pt"), ("{}/m-1-of-2.pt", "{}/m-2-of-2.pt"), ("a.pt", "b.pt")],
)
def test_the_files_of_a_checkpoint_belong_together(tmp_path: Path, names: tuple[str, str]) -> None:
    lines = [
        blocking(1e9 + step + 0.3 * number, name.format(step))
        for step in range(4)
        for number, name in enumerate(names)
    ]
    found = observed(tmp_path, lines)
    assert found.storms == 4
    assert found.stall == found.save == pytest.approx(0.5)


def test_saves_in_the_background_hold_training_for_the_copy_alone(tmp_path: Path) -> None:
    lines = [line(0, 7, 1e9 + 8.5 * step, path=f"run/step-{step}.pt") for step in range(4)]
    found = observed(tmp_path, lines)
    assert (found.storms, found.stall, found.save) == (4, 0.5, 8.0)
