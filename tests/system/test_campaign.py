# SPDX-License-Identifier: Apache-2.0
"""Test that the campaign notices what it tests for, and that its short form is reproducible."""

import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import hostile
import pytest

from tests.campaign import crowd_judge, files, files_process, files_tried, fuzz, ledger
from tests.campaign.files_tried import Base, Damaged
from tests.campaign.trial import Trial

pytestmark = pytest.mark.slow


def kill(_path: Path, _file: Damaged) -> None:
    os.abort()


def burn(_path: Path, _file: Damaged) -> None:
    end = time.process_time() + files_process.MOST_SECONDS + 0.2
    while time.process_time() < end:
        pass


def hang(_path: Path, _file: Damaged) -> None:
    time.sleep(60)


def take_memory(_path: Path, _file: Damaged) -> None:
    try:
        # Not from the heap, much of which may be free in the process of these tests.
        mmap.mmap(-1, (files_process.MOST_MIB + 10) << 20)
    except OSError as error:
        files_tried.refused(error)


def sees_nothing(_path: Path, _file: Damaged) -> None:
    raise files_tried.Silent("is loaded")


def try_two_files(
    monkeypatch: pytest.MonkeyPatch, folder: Path, way: Callable[[Path, Damaged], None]
) -> Trial:
    """Try two files, of which only the second is read in this way.

    The valid file is skipped, too.
    """
    valid = [Base("valid", hostile.valid(), None)]
    second = files_process.file_of(1, 1, valid)

    def try_second(path: Path, file: Damaged) -> None:
        if file == second:
            way(path, file)

    monkeypatch.setattr(files_process, "FILES", 2)
    monkeypatch.setattr(files_process, "WAYS", {"way": try_second})
    monkeypatch.setattr(files_tried, "WAYS", {"way": try_second})
    monkeypatch.setattr(files, "HANGS_S", 10.0)
    return files.run(1, valid, folder, folder)


@pytest.mark.parametrize("way", [kill, burn, hang, take_memory, sees_nothing])
def test_what_goes_wrong_is_found(
    way: Callable[[Path, Damaged], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = try_two_files(monkeypatch, tmp_path, way)
    assert len(trial.findings) == 1
    assert trial.counts["bad_files"] == 2
    assert trial.counts["bad_silent"] == (way is sees_nothing)
    assert trial.counts.get("fuzz_findings_open", 0) == (way is not sees_nothing)
    assert (tmp_path / "seed-1-file-1.pt").exists()


def test_nothing_is_found_where_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial = try_two_files(monkeypatch, tmp_path, lambda _path, _file: None)
    assert (trial.findings, trial.counts["bad_silent"]) == ([], 0)


def test_what_the_fuzz_targets_get_in_the_short_form_follows_from_the_seed(tmp_path: Path) -> None:
    shutil.unpack_archive(fuzz.KEPT, tmp_path)
    for name in fuzz.names():
        once, again, other = (list(fuzz.made(name, seed, tmp_path)) for seed in (1, 1, 2))
        assert once == again != other
        assert len(set(once)) > fuzz.N_SHORT / 2


def test_the_next_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert ledger.next_seed("kills", path) == 1
    one = ledger.Slice("kills", "abc", 1, 0)
    one.add(1, Trial({"kills": 2}, {"seconds": 0.5}, ["it is torn"]))
    one.add(2, Trial({"kills": 3}, {"seconds": 0.2}))
    assert (one.counts, one.worst) == ({"kills": 5}, {"seconds": 0.5})
    assert one.findings == ["seed 1: it is torn"]
    ledger.append(one, path)
    ledger.append(ledger.Slice("power", "abc", 7, 9), path)
    assert [ledger.next_seed(kind, path) for kind in ("kills", "power", "fuzz")] == [3, 10, 1]


# ---- The kind "crowd" ---------------------------------------------------------------------------

RANK_OF_JOB = {50: 3}

#: Two consecutive saves, 7 and then 8, both acknowledged.
TWO_SAVES = (
    "10 1.1-crow ask turn=0 step=7 file=/m/user0/a.pt",
    "20 1.1-crow saved turn=0",
    "30 2.1-crow ask turn=0 step=8 file=/m/user0/a.pt",
    "40 2.1-crow saved turn=0",
)


def story_of(folder: Path, *lines: str, **deaths: int) -> crowd_judge.Story:
    (folder / "log").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return crowd_judge.Story(folder / "log", deaths, RANK_OF_JOB)


@pytest.mark.parametrize(
    ("there", "wrong"),
    [
        ({"user0/a.pt": 8}, 0),
        ({"user0/a.pt": 7}, 1),  # 8 was saved after it
        ({"user0/a.pt": 9}, 1),  # 9 was never saved
        ({}, 1),
    ],
)
def test_the_last_save_acknowledged_has_to_be_there(
    there: dict[str, int], wrong: int, tmp_path: Path
) -> None:
    story = story_of(tmp_path, *TWO_SAVES)
    assert len(list(crowd_judge.judge_files(story, there))) == wrong


def test_of_saves_side_by_side_either_may_be_there(tmp_path: Path) -> None:
    one, _, other, end = TWO_SAVES
    story = story_of(tmp_path, one, other, end, "50 1.1-crow saved turn=0")
    for content in 7, 8:
        assert not list(crowd_judge.judge_files(story, {"user0/a.pt": content}))


def test_in_one_process_the_later_save_wins(tmp_path: Path) -> None:
    lines = (
        "10 1.1-crow ask turn=0 step=7 file=/m/user0/a.pt",
        "20 1.1-crow ask turn=1 step=8 file=/m/user0/a.pt",
        "30 1.1-crow saved turn=0",
        "40 1.1-crow saved turn=1",
    )
    assert len(list(crowd_judge.judge_files(story_of(tmp_path, *lines), {"user0/a.pt": 7}))) == 1


def test_who_died_may_have_saved_but_not_after_its_death(tmp_path: Path) -> None:
    lines = (
        "10 1.1-crow ask turn=0 step=7 file=/m/user0/a.pt",
        "30 2.1-crow ask turn=0 step=8 file=/m/user0/a.pt",
        "40 2.1-crow saved turn=0",
    )
    for died, wrong in (25, 1), (35, 0):
        story = story_of(tmp_path, *lines, **{"1.1-crow": died})
        assert len(list(crowd_judge.judge_files(story, {"user0/a.pt": 7}))) == wrong


def test_a_job_begins_again_where_it_was(tmp_path: Path) -> None:
    for latest, wrong in (6, 0), (5, 1):
        story = story_of(
            tmp_path,
            "10 50.1-grou begin pid=1",
            "20 50.1-grou kept turn=6",
            "30 50.2-grou begin pid=2",
            f"40 50.2-grou latest step={latest}",
        )
        assert (len(story.findings), story.newest(3)) == (wrong, 6)
