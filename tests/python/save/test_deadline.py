# SPDX-License-Identifier: Apache-2.0
"""Saves of processes that will end soon, and how a process learns that it will."""

import os
import signal
import threading
import time
from pathlib import Path

import ioshape
import pytest
import torch
from nodes import started_ranks
from processes import TIMEOUT_S, run_program, started_program

LONG_S = 600.0  # no test takes so long
LARGE = {"weights": torch.zeros(5 << 20)}  # too large to pass the queue


@pytest.fixture(autouse=True)
def _a_pool_of_one_slot() -> None:
    ioshape.configure(pool="deadlines", slots=1)


# ---- Saves ---------------------------------------------------------------------------------------


def test_a_save_with_a_deadline_does_not_wait_for_the_slot(tmp_path: Path) -> None:
    with ioshape.slot(pool="deadlines"):
        waiting = ioshape.save_async(LARGE, tmp_path / "waiting.pt")
        report = ioshape.save(LARGE, tmp_path / "model.pt", deadline=LONG_S)
        assert report.deadline_met is True
        assert 0 < report.deadline_left_s < LONG_S
        assert report.coordinator == "local"  # it had a slot
        assert not waiting.done()
    other = waiting.result()
    assert other.deadline_met is None
    assert other.deadline_left_s == 0


@pytest.mark.parametrize("new_format", [True, False], ids=["ours", "torch's own writer"])
def test_a_save_that_is_too_late_is_saved_and_says_so(tmp_path: Path, new_format: bool) -> None:
    path = tmp_path / "model.pt"
    with ioshape.slot(pool="deadlines"), ioshape.slot(pool="deadlines", deadline=LONG_S):
        report = ioshape.save(LARGE, path, _use_new_zipfile_serialization=new_format, deadline=-1.0)
    assert report.deadline_met is False
    assert report.deadline_left_s < 0
    assert report.coordinator == "deadline"
    assert [step.code for step in report.downgrades][-1] == "slot"
    assert torch.equal(torch.load(path)["weights"], LARGE["weights"])


def test_a_group_with_a_deadline_leaves_old_checkpoints_to_the_next_save(tmp_path: Path) -> None:
    def steps() -> list[int]:
        return [one.step for one in ioshape.checkpoints(tmp_path)]

    with ioshape.slot(pool="deadlines"):
        for step in (1, 2):
            report = ioshape.save_group(LARGE, tmp_path, step, keep_last=1, deadline=LONG_S)
            assert report.deadline_met is True
    assert sorted(steps()) == [1, 2]
    handle = ioshape.save_group_async(LARGE, tmp_path, 3, keep_last=1)
    assert handle.result().deadline_met is None
    assert steps() == [3]


IN_A_HURRY = """
from group_program import *

# Equal parts would be stored once: the other rank would wait for no slot.
state = {"weights": torch.full((5 << 20,), float(rank))}
earlier = ioshape.save_group_async(state, arguments[0], 1)
while not earlier.progress.ahead:
    time.sleep(0.01)
earlier.cancel()
report = ioshape.save_group(state, arguments[0], 2, deadline=600.0)
say("saved", met=report.deadline_met)
"""


def test_ranks_that_cancel_an_earlier_save_of_their_group_go_before_others(tmp_path: Path) -> None:
    """Check that a save with a deadline does not wait for the slot of an earlier, canceled save.

    A group writes its checkpoints one after the other.
    """
    folder = tmp_path / "checkpoints"
    with (
        ioshape.slot(pool="deadlines"),
        started_ranks(
            *(tmp_path, IN_A_HURRY, folder),
            IOSHAPE_POOL="deadlines",
            IOSHAPE_SLOTS="1",
            IOSHAPE_MODE="each",
        ) as job,
    ):
        assert [line["met"] for line in job.await_all("saved")] == [True, True]
        job.end()
    assert [one.step for one in ioshape.checkpoints(folder)] == [2]


# ---- Notices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noticed_and_goes_to_who_waited_for_it_before(number: signal.Signals) -> None:
    heard: list[int] = []

    def hear(got: int, _frame: object) -> None:
        heard.append(got)

    before = signal.signal(number, hear)
    try:
        with ioshape.on_preemption(LONG_S) as outer, ioshape.on_preemption(LONG_S) as notice:
            assert not notice
            assert notice.left is None
            assert notice.reason == ""
            signal.raise_signal(number)
            assert notice
            assert outer
            assert notice.reason == number.name
            left = notice.left
            assert left is not None
            assert 0 < left < LONG_S
            signal.raise_signal(number)  # the first signal determines the time that is left
            assert notice.left is not None
            assert notice.left < left
        assert heard == [number, number]
        assert signal.getsignal(number) is hear
    finally:
        signal.signal(number, before)


def test_a_file_that_appears_is_noticed(tmp_path: Path) -> None:
    with ioshape.on_preemption(file=tmp_path / "stop", signals=()) as notice:
        assert not notice
        (tmp_path / "stop").touch()
        end = time.monotonic() + TIMEOUT_S
        while not notice:
            assert time.monotonic() < end
        assert notice.reason == str(tmp_path / "stop")
        (tmp_path / "stop").unlink()
        assert notice


def test_what_a_notice_has_left_can_be_given_to_every_save(tmp_path: Path) -> None:
    with ioshape.on_preemption(LONG_S) as notice:
        report = ioshape.save(LARGE, tmp_path / "model.pt", deadline=notice.left)
        assert report.deadline_met is None
        signal.raise_signal(signal.SIGTERM)
        report = ioshape.save(LARGE, tmp_path / "model.pt", deadline=notice.left)
        assert report.deadline_met is True


def test_another_thread_watches_for_a_file_but_not_for_signals(tmp_path: Path) -> None:
    results: list[object] = []

    def run() -> None:
        ioshape.on_preemption(file=tmp_path, signals=())
        try:
            ioshape.on_preemption()
        except ValueError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT_S)
    assert len(results) == 1


def test_a_handler_that_came_later_stays_and_a_bad_signal_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with ioshape.on_preemption():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        with pytest.raises((OSError, ValueError)):
            ioshape.on_preemption(signals=(signal.SIGUSR1, signal.SIGKILL))
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


FORKS = """
import os, signal, time
import ioshape

with ioshape.on_preemption() as notice:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"!")
        while True:
            time.sleep(0.05)
    os.read(reader, 1)  # Python forgets what comes while it forks
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not notice
"""


def test_a_forked_child_ends_by_the_signal(tmp_path: Path) -> None:
    run_program(tmp_path, FORKS)


def test_a_job_that_is_told_to_end_saves_before_those_that_wait(tmp_path: Path) -> None:
    """Check a whole job: the signal comes while other processes hold the slot and wait for it."""
    program = """
import sys, time
import ioshape, torch

ioshape.configure(pool="deadlines", slots=1)
with ioshape.on_preemption(600) as notice:
    print("ready", flush=True)
    while not notice:
        time.sleep(0.01)
    report = ioshape.save(torch.zeros(5 << 20), sys.argv[1], deadline=notice.left)
print(report.deadline_met, notice.reason, flush=True)
"""
    with ioshape.slot(pool="deadlines"):
        waiting = ioshape.save_async(LARGE, tmp_path / "waiting.pt")
        with started_program(tmp_path, program, tmp_path / "model.pt") as told:
            told.expect("ready")
            os.kill(told.pid, signal.SIGTERM)
            told.expect("True SIGTERM")
            told.end()
        assert not waiting.done()
    waiting.result()
