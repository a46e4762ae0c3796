# SPDX-License-Identifier: Apache-2.0
"""The newest intact checkpoint is loaded; those that were passed over are named with reasons."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import ioshape
import pytest
from checkpoints import checkpoint
from nodes import run_ranks
from records import flip, offset_of

BEGIN = "from group_program import *\nimport warnings\n"

SAVE = (
    BEGIN
    + """
for step in range(1, 8):
    ioshape.save_group(object_of(rank, step), arguments[0], step, mode=arguments[1])
"""
)

LOAD = (
    BEGIN
    + """
for load in (lambda path: ioshape.load_group(path, fallback=True), ioshape.load_latest):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(arguments[0])
    (warning,) = [one.message for one in caught if one.category is ioshape.FallbackWarning]
    say("loaded", step=found["step"], right=is_right(found, rank, found["step"]), path=warning.path,
        passed=[one.path for one in warning.passed_over],
        errors=[type(one.error).__name__ for one in warning.passed_over],
        files=[one.error.filename for one in warning.passed_over])
"""
)


def bundle(checkpoint: Path) -> Path:
    """Return the shard file of the last rank."""
    return sorted(path for path in checkpoint.iterdir() if path.name != "manifest.json")[-1]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_in_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


@pytest.mark.parametrize("mode", ["each", "node"])
@pytest.mark.slow
def test_all_ranks_load_the_newest_intact_checkpoint(tmp_path: Path, mode: str) -> None:
    runs = tmp_path / "runs"
    run_ranks(tmp_path, SAVE, runs, mode, ranks=4, nodes=2)
    folders = {step: runs / f"step-{step:010}" for step in range(1, 8)}
    files = {step: bundle(folder) for step, folder in folders.items()}
    (folders[7] / "manifest.json").unlink()
    files[6].unlink()
    truncate(files[5])
    flip_in_the_middle(folders[4] / "manifest.json")
    flip_in_the_middle(files[3])
    said = run_ranks(tmp_path, LOAD, runs, ranks=4, nodes=2)
    assert len(said) == 4
    for lines in said:
        loaded = [line for line in lines if line["event"] == "loaded"]
        assert len(loaded) == 2
        for one in loaded:
            assert (one["step"], one["right"], one["path"]) == (2, True, str(folders[2]))
            # The position of a checkpoint without a readable manifest is not known.
            passed = dict(zip(one["passed"], one["errors"], strict=True))
            assert passed == {
                str(folders[7]): "FileNotFoundError",
                **{str(folders[step]): "DamagedError" for step in (6, 5, 4, 3)},
            }
            assert one["passed"].index(str(folders[5])) < one["passed"].index(str(folders[3]))
            assert one["files"][one["passed"].index(str(folders[3]))] == str(files[3])


def test_nothing_is_passed_over_where_all_is_well(tmp_path: Path) -> None:
    for step in (3, 1):
        ioshape.save_group(checkpoint(step), tmp_path / "runs", step)
        ioshape.save(checkpoint(step), tmp_path / f"{step}.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ioshape.load_group(tmp_path / "runs", fallback=True)["number"] == 1
        assert ioshape.load_latest(tmp_path / "runs")["number"] == 1
        assert ioshape.load_latest(tmp_path / "*.pt")["number"] == 1


@pytest.mark.parametrize("kind", ["pruned", "replaced"])
def test_what_was_being_removed_when_its_job_died_is_not_newer(tmp_path: Path, kind: str) -> None:
    runs = tmp_path / "runs"
    for step in (1, 2):
        ioshape.save_group(checkpoint(step), runs, step)
    left = (runs / "step-0000000001").rename(runs / f".{kind}-step-0000000001.0123456789abcdef")
    (left / "manifest.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ioshape.load_group(runs, fallback=True)["number"] == 2


def test_where_none_is_intact_it_says_why(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for load in (ioshape.load_latest, lambda path: ioshape.load_group(path, fallback=True)):
        with pytest.raises(FileNotFoundError):
            load(runs)
    assert not runs.exists()
    ioshape.save_group(checkpoint(1), runs, 1)
    flip_in_the_middle(bundle(runs / "step-0000000001"))
    with pytest.raises(ioshape.errors.NoUsableCheckpointError) as raised:
        ioshape.load_latest(runs)
    assert isinstance(raised.value.__cause__, ioshape.DamagedError)
    with pytest.raises(ValueError, match="leave out step"):
        ioshape.load_group(runs, step=1, fallback=True)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(1000))


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda path: flip(path, offset_of(path, "data/0") + 9), ioshape.DamagedError),
        (truncate, ioshape.DamagedError),
        (lambda path: os.truncate(path, 0), ioshape.DamagedError),
        (overwrite, ioshape.errors.FormatError),
    ],
)
def test_the_newest_intact_file_of_a_pattern_is_loaded(
    tmp_path: Path, harm: Callable[[Path], object], kind: type[Exception]
) -> None:
    paths = [tmp_path / f"step-{step}.pt" for step in (100, 20, 3)]
    for number, path in enumerate(paths):
        ioshape.save(checkpoint(number), path)
    harm(paths[2])
    for number, path in enumerate(paths):
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    with pytest.warns(ioshape.FallbackWarning) as caught:
        found = ioshape.load_latest(tmp_path / "step-*.pt")
    assert found["number"] == 1
    warning = caught[0].message
    assert isinstance(warning, ioshape.FallbackWarning)
    assert caught[0].filename == __file__
    assert warning.path == str(paths[1])
    (passed,) = warning.passed_over
    assert passed.path == passed.error.filename == str(paths[2])
    assert isinstance(passed.error, kind)


def test_of_files_of_one_time_the_higher_number_is_newer(tmp_path: Path) -> None:
    for step in (9, 10):
        ioshape.save(checkpoint(step), tmp_path / f"step-{step}.pt")
        os.utime(tmp_path / f"step-{step}.pt", (1_700_000_000, 1_700_000_000))
    assert ioshape.load_latest(str(tmp_path / "*.pt"))["number"] == 10
    with pytest.raises(FileNotFoundError):
        ioshape.load_latest(tmp_path / "none-*.pt")
