# SPDX-License-Identifier: Apache-2.0
"""The campaign sees what it is there for, and its short form repeats itself."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import hostile
import pytest

from tests.campaign import files, files_process, files_tried, fuzz
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
        bytes((files_process.MOST_MIB + 10) << 20)
    except MemoryError as error:
        files_tried.refused(error)


def sees_nothing(_path: Path, _file: Damaged) -> None:
    raise files_tried.Silent("is loaded")


def try_two_files(
    monkeypatch: pytest.MonkeyPatch, folder: Path, way: Callable[[Path, Damaged], None]
) -> Trial:
    """The second of them is tried in that way, the first and the sound one in none."""
    sound = [Base("sound", hostile.sound(), None)]
    second = files_process.file_of(1, 1, sound)

    def try_second(path: Path, file: Damaged) -> None:
        if file == second:
            way(path, file)

    monkeypatch.setattr(files_process, "FILES", 2)
    monkeypatch.setattr(files_process, "WAYS", {"way": try_second})
    monkeypatch.setattr(files_tried, "WAYS", {"way": try_second})
    monkeypatch.setattr(files, "HANGS_S", 10.0)
    return files.run(1, sound, folder, folder)


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
