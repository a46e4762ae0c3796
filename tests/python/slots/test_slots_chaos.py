# SPDX-License-Identifier: Apache-2.0
"""No slot is held twice, whatever happens to clients and coordinators.

The tests run short forms of the scenes in chaos_scenes.py; the campaign's kind `slots` runs long
ones. IOSHAPE_TEST_CHAOS_SEED=seed repeats a scene. Without it the seed is fixed. Every fault is
printed with its seed.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from chaos import Proxy, scene
from chaos_judge import Harm, Verdict, judge
from chaos_scenes import NOTHING, SCENES, SHORT_LEASE_MS, a_server
from coordinators import await_true
from nodes import NotPermitted

SEED = int(os.environ.get("IOSHAPE_TEST_CHAOS_SEED", "4"))

# Rounds of a few seconds each, with the longest scenes first.
SHORT = {
    "master_fails": 1,
    "link_is_cut": 3,
    "line_is_bad": 3,
    "redis_dies_without": 2,
    "redis_dies_with_file": 2,
    "redis_dies_at_rest": 4,
    "saves_go_on_redis": 7,
    "saves_go_on_local": 7,
    "redis_refuses": 3,
    "clients_die_redis": 30,
    "clients_die_local": 30,
    "clients_stop_redis": 10,
    "clients_stop_local": 10,
    "slots_of_the_dead_redis": 3,
    "redis_stops": 2,
    "slots_of_the_dead_local": 10,
}


AT_ONCE = 4  # the number of scenes that run together; they wait most of the time

Results = dict[tuple[str, int], Future[Verdict]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Results]:
    """Run the scenes of all selected tests in the background, and yield their verdicts."""
    asked = [
        (item.callspec.params["name"], item.callspec.params["rounds"])
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {one: pool.submit(SCENES[one[0]], SEED, one[1]) for one in asked}


def must_be_well(results: Results, name: str, rounds: int) -> None:
    try:
        verdict = results[name, rounds].result()
    except NotPermitted as error:
        pytest.skip(f"this machine does not permit networks of one's own: {error}")
    assert not verdict.faults(), f"seed {SEED}: {verdict.faults()[:5]}"
    # The lease is long compared with the time in which a client comes back.
    if name in {"redis_dies_with_file", "redis_dies_without"}:
        assert not verdict.over_after_loss, f"seed {SEED}: {verdict.over_after_loss[:5]}"
    assert verdict.counts["got"] + verdict.counts["saved"] > 0
    # A busy machine delays some of the reclaims, so only the fastest one is checked.
    if name == "slots_of_the_dead_redis":
        assert min(verdict.reclaims) <= 1
    if name == "slots_of_the_dead_local":
        assert min(verdict.reclaims) < SHORT_LEASE_MS


@pytest.mark.parametrize(("name", "rounds"), SHORT.items())
@pytest.mark.slow
def test_no_slot_is_held_twice(results: Results, name: str, rounds: int) -> None:
    must_be_well(results, name, rounds)


@pytest.mark.long
@pytest.mark.parametrize(("name", "rounds"), [(name, 10 * SHORT[name]) for name in SHORT])
def test_no_slot_is_held_twice_in_the_long_run(results: Results, name: str, rounds: int) -> None:
    must_be_well(results, name, rounds)


def lost_at(log: Path) -> float | None:
    for line in log.read_text(encoding="utf-8").splitlines():
        words = line.split(maxsplit=3)
        if words[2] == "lost":
            return int(words[0]) / 1e9
    return None


def test_a_holder_is_told_in_time_even_if_no_answer_comes() -> None:
    lease_ms = SHORT_LEASE_MS
    with a_server(*NOTHING) as server, scene(1, "open", lease_ms=lease_ms, capacity=1) as here:
        proxy = Proxy(here.folder / "proxy", server.socket, 1)
        try:
            here.variables["IOSHAPE_COORDINATOR"] = proxy.address
            here.add(1, "turns", "100000000", "1", "large")
            await_true(lambda: " got " in here.log.read_text(encoding="utf-8"), "a slot")
            # Some heartbeats have been answered by then.
            time.sleep(1.2 * lease_ms / 1000)
            assert lost_at(here.log) is None
            proxy.mode = "swallow"
            silent = time.monotonic()
            await_true(lambda: lost_at(here.log) is not None, "it is told")
            told = lost_at(here.log)
            assert told is not None
            assert told - silent <= (0.9 + 1 / 6) * lease_ms / 1000
        finally:
            proxy.close()


# ---- The judge -----------------------------------------------------------------------------------


def judged(tmp_path: Path, *lines: str, harm: Harm | None = None, capacity: int = 1) -> Verdict:
    """Return the verdict on a log. Times are in milliseconds."""
    log = tmp_path / "log"
    text = ""
    for line in lines:
        at, rest = line.split(maxsplit=1)
        text += f"{int(at) * 1_000_000} {rest}\n"
    log.write_text(text, encoding="utf-8")
    return judge(log, harm or Harm(), capacity, 900)


def got(client: str, fence: int, *, by: str = "redis", express: int = 0, turn: int = 0) -> str:
    return f"{client} got turn={turn} fence={fence} by={by} express={express} weight=1 capacity=1; "


def test_the_judge_sees_two_where_one_may_be(tmp_path: Path) -> None:
    story = [f"0 {got('a', 1)}", f"10 {got('b', 2)}", "20 a release turn=0", "30 b release turn=0"]
    assert len(judged(tmp_path, *story).over) == 1
    assert not judged(tmp_path, *story, capacity=2).over
    assert not judged(tmp_path, story[0], "10 a release turn=0", *story[1:2], story[3]).over


def test_the_judge_counts_neither_express_ones_nor_those_without_a_coordinator(
    tmp_path: Path,
) -> None:
    ends = ["20 a release turn=0", "30 b release turn=0"]
    assert not judged(tmp_path, f"0 {got('a', 1)}", f"10 {got('b', 2, express=1)}", *ends).over
    assert not judged(tmp_path, f"0 {got('a', 1)}", f"10 {got('b', 0, by='stagger')}", *ends).over


def test_the_judge_lets_the_last_sixth_of_a_lost_lease_pass_and_no_more(tmp_path: Path) -> None:
    for late, faults in ((149, 0), (151, 1)):
        story = [f"0 {got('a', 1)}", f"1000 {got('b', 2)}", f"{1000 + late} a lost turn=0; why"]
        assert len(judged(tmp_path, *story, "2000 b release turn=0").over) == faults


def test_the_judge_lets_pass_what_a_stopped_process_cannot_know(tmp_path: Path) -> None:
    for taken, faults in ((539, 1), (541, 0)):
        harm = Harm(stops=[("a", 0, 5_000_000_000)])
        story = [f"0 {got('a', 1)}", f"{taken} {got('b', 2)}", "5149 a release turn=0"]
        assert len(judged(tmp_path, *story, "6000 b release turn=0", harm=harm).over) == faults


def test_the_judge_takes_stops_without_time_between_them_for_one(tmp_path: Path) -> None:
    for again, faults in ((1100, 0), (1200, 1)):
        harm = Harm(stops=[("a", 0, 1_000_000_000), ("a", again * 1_000_000, 2_000_000_000)])
        story = [f"0 {got('a', 1)}", f"1500 {got('b', 2)}", "2000 a lost turn=0; why"]
        assert len(judged(tmp_path, *story, "2100 b release turn=0", harm=harm).over) == faults


def test_the_judge_sees_the_dead_hold_nothing(tmp_path: Path) -> None:
    harm = Harm(deaths={"a": 9_000_000})
    story = [f"0 {got('a', 1)}", f"10 {got('b', 2)}", "30 b release turn=0"]
    assert not judged(tmp_path, *story, harm=harm).faults()
    assert judged(tmp_path, *story).hung


def test_the_judge_sees_lost_data_apart_and_never_twice_the_capacity(tmp_path: Path) -> None:
    harm = Harm(losses=[(5_000_000, 6_000_000)])
    ends = [f"{at} {who} release turn=0" for at, who in ((40, "a"), (50, "b"), (60, "c"))]
    verdict = judged(tmp_path, f"0 {got('a', 1)}", f"10 {got('b', 2)}", *ends[:2], harm=harm)
    assert not verdict.over
    assert len(verdict.over_after_loss) == 1
    late = [f"0 {got('a', 1)}", f"1 {got('c', 2)}", f"10 {got('b', 3)}", *ends]
    assert judged(tmp_path, *late, harm=harm).over


def test_the_judge_sees_fences_twice_and_out_of_order(tmp_path: Path) -> None:
    story = [f"0 {got('a', 7)}", "10 a release turn=0", f"20 {got('b', 7)}", "30 b release turn=0"]
    assert judged(tmp_path, *story).dup_fences
    story = [story[0], story[1], "15 b ask turn=0", f"20 {got('b', 6)}", story[3]]
    verdict = judged(tmp_path, *story)
    assert not verdict.dup_fences
    assert verdict.fences_back


def test_the_judge_sees_saves_and_turns_that_fail(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "0 1.1-save fail turn=0 code=-5; disk", "1 2.1-turn fail turn=0; x")
    assert len(verdict.failed_saves) == len(verdict.failed_turns) == 1


def test_a_proxy_can_be_stopped_at_any_time() -> None:
    with a_server(*NOTHING) as server:
        proxy = Proxy(server.folder / "proxy", server.socket, 1)
        assert server.answers()
        server.signal(signal.SIGSTOP)
        server.signal(signal.SIGCONT)
        proxy.close()
