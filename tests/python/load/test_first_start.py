# SPDX-License-Identifier: Apache-2.0
"""Only a path without any checkpoint is a first start. Otherwise no job may start over."""

import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import checkpoint, names_in
from coordinators import await_true
from dcp_states import save as save_dcp
from nodes import run_ranks
from page_programs import programs
from processes import environment
from records import flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an")

NOBODY = 65534

Load = Callable[[Any], Any]


def load_group(where: Any) -> Any:
    return ioshape.load_group(where)


def load_intact(where: Any) -> Any:
    return ioshape.load_group(where, fallback=True)


def load_dcp(where: Any) -> Any:
    return ioshape.dcp.load_latest({"step": 0}, where, no_dist=True)


OF_DIRECTORIES: list[Load] = [
    ioshape.load_latest,
    load_group,
    load_intact,
    load_dcp,
    ioshape.latest,
]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def files(folder: Path) -> list[Path]:
    """Save three checkpoints as files, and return their paths."""
    folder.mkdir(exist_ok=True)
    for step in (1, 2, 3):
        ioshape.save(checkpoint(step), folder / f"step-{step}.pt")
    return sorted(folder.iterdir())


def no_usable(load: Load, where: Any) -> ioshape.errors.NoUsableCheckpointError:
    """Return the error of a load. It must not look like a first start, a FileNotFoundError."""
    with pytest.raises(ioshape.errors.NoUsableCheckpointError) as raised:
        load(where)
    assert not isinstance(raised.value, FileNotFoundError)
    assert isinstance(raised.value, ioshape.StorageError)
    assert raised.value.errno == errno.EBADMSG
    assert raised.value.filename == str(where)
    return raised.value


# ---- No checkpoint -------------------------------------------------------------------------------


@pytest.mark.parametrize("load", OF_DIRECTORIES)
def test_a_directory_without_checkpoints_is_a_first_start(tmp_path: Path, load: Load) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("train.log", "pretrained.pt", "events.out.1", "config-1.json"):
        (tmp_path / "other" / name).write_text("mine")
    (tmp_path / "other" / "logs-1").mkdir()
    for name in ("missing", "empty", "other"):
        if load is ioshape.latest:
            assert load(tmp_path / name) is None
            continue
        with pytest.raises(FileNotFoundError, match=r"^cannot (load|open)"):
            load(tmp_path / name)


@pytest.mark.parametrize("pattern", ["missing/step-*.pt", "there/step-*.pt", "m*/*/step-[0-9].pt"])
def test_a_pattern_of_nothing_is_a_first_start(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError) as raised:
        ioshape.load_latest(tmp_path / pattern)
    assert str(raised.value) == (
        f'cannot load "{tmp_path / pattern}": no file matches this pattern yet'
    )
    with pytest.raises(FileNotFoundError, match="there is no such file; give a directory"):
        ioshape.load_latest(tmp_path / "last.pt")


def test_what_a_dead_first_save_has_left_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000009.01234567-01234567-0123456789abcdef").mkdir()
    with pytest.raises(FileNotFoundError):
        ioshape.load_latest(tmp_path)


# ---- Damaged checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("harm", [cut, damage, lambda path: path.write_text("no zip")])
def test_files_of_which_none_can_be_used_are_named(
    tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    paths = files(tmp_path)
    for number, path in enumerate(paths):
        harm(path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    error = no_usable(ioshape.load_latest, tmp_path / "step-*.pt")
    assert [one.path for one in error.passed_over] == [str(path) for path in paths[::-1]]
    assert all(str(path) in str(error) for path in paths)
    assert "none of 3 checkpoints can be used" in error.sentence
    assert "move them away" in error.remedy
    assert error.__cause__ is error.passed_over[0].error
    assert names_in(tmp_path) == [path.name for path in paths]


def test_many_files_make_one_sentence_that_can_be_read(tmp_path: Path) -> None:
    for step in range(40):
        (tmp_path / f"step-{step}.pt").write_text("no zip")
    error = no_usable(ioshape.load_latest, tmp_path / "*.pt")
    assert len(error.passed_over) == 40
    assert str(error).count("step-") < 20
    assert "and 35 more" in str(error)


def test_a_link_whose_file_is_gone_is_something(tmp_path: Path) -> None:
    (tmp_path / "step-1.pt").symlink_to("/mnt/not-mounted/step-1.pt")
    error = no_usable(ioshape.load_latest, tmp_path / "*.pt")
    assert isinstance(error.passed_over[0].error, FileNotFoundError)


@pytest.mark.parametrize("load", [ioshape.load_latest, load_group, load_intact, ioshape.latest])
@pytest.mark.parametrize("lost", ["manifest.json", "rank-00000.pt"])
def test_checkpoints_of_which_none_is_complete_are_named(
    tmp_path: Path, load: Load, lost: str
) -> None:
    for step in (1, 2):
        ioshape.save_group(checkpoint(step), tmp_path, step, mode="each")
        (tmp_path / f"step-{step:010}" / lost).unlink()
    error = no_usable(load, tmp_path)
    assert "2 checkpoints are in it" in error.sentence
    assert all(f"step-{step:010}" in error.sentence for step in (1, 2))
    assert str(tmp_path) in error.remedy


@pytest.mark.parametrize("load", [ioshape.load_latest, load_intact])
def test_checkpoints_of_which_none_is_intact_are_named(tmp_path: Path, load: Load) -> None:
    for step in (1, 2):
        ioshape.save_group(checkpoint(step), tmp_path, step, mode="each")
        damage(tmp_path / f"step-{step:010}" / "rank-00000.pt")
    error = no_usable(load, tmp_path)
    assert [type(one.error) for one in error.passed_over] == [ioshape.DamagedError] * 2
    assert [Path(one.path).name for one in error.passed_over] == [
        "step-0000000002",
        "step-0000000001",
    ]


@pytest.mark.slow
def test_all_ranks_end_where_none_is_intact(tmp_path: Path) -> None:
    program = """
        from group_program import *
        ioshape.save_group(object_of(rank, 1), arguments[0], 1, mode="each")
        set_up_distributed()
        torch.distributed.barrier()
        if rank == 0:
            os.truncate(arguments[0] + "/step-0000000001/rank-00001.pt", 100)
        torch.distributed.barrier()
        for load in (ioshape.load_group, ioshape.load_latest):
            try:
                load(arguments[0])
            except ioshape.StorageError as error:
                say("failed", kind=type(error).__name__)
    """
    said = run_ranks(tmp_path, program, tmp_path / "runs", ranks=2, nodes=1)
    for rank, lines in enumerate(said):
        failed = {"event": "failed", "rank": rank, "kind": "NoUsableCheckpointError"}
        assert lines[-2:] == [failed, failed]


@pytest.mark.parametrize("load", [ioshape.load_latest, load_dcp, ioshape.latest])
def test_checkpoints_of_dcp_of_which_none_is_complete_are_named(tmp_path: Path, load: Load) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", {"step": step, "w": torch.ones(100_000)})
        os.truncate(tmp_path / f"step-{step}" / "__0_0.distcp", 1000)
    error = no_usable(load, tmp_path)
    assert sorted(Path(one.path).name for one in error.passed_over) == ["step-1", "step-2"]
    assert all(f"step-{step}" in str(error) for step in (1, 2))
    for step in (1, 2):
        (tmp_path / f"step-{step}" / ".metadata").unlink()
    assert "has no .metadata" in str(no_usable(load, tmp_path))


def test_what_lies_on_the_tier_alone_and_is_damaged_is_something(tmp_path: Path) -> None:
    tier, runs = tmp_path / "tier", tmp_path / "runs"
    (tier / "x").mkdir(parents=True)
    runs.mkdir()
    ioshape.save_group(checkpoint(1), runs, 1, mode="each", tier=tier)
    (copy,) = tier.rglob("step-0000000001/rank-00000.pt")
    # Otherwise the drain would create the directory again.
    await_true((runs / "step-0000000001").exists, "the drain")
    shutil.rmtree(runs)
    runs.mkdir()
    cut(copy)
    for load in OF_DIRECTORIES[:3]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ioshape.errors.NoUsableCheckpointError):
                load_with_tier(load, runs, tier)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("load", [*OF_DIRECTORIES[:3], ioshape.latest])
def test_a_tier_that_cannot_be_looked_at_is_no_first_start(tmp_path: Path, load: Load) -> None:
    tier, runs = tmp_path / "tier", tmp_path / "runs"
    for folder in (tier, runs):
        folder.mkdir()
    with pytest.raises(FileNotFoundError):
        load_with_tier(ioshape.load_latest, runs / "*.pt", tier)
    (own,) = tier.iterdir()
    os.chown(own, 60001, -1)
    for where in (runs, runs / "*.pt") if load is ioshape.load_latest else (runs,):
        with pytest.raises(PermissionError, match="belongs to user 60001"):
            load_with_tier(load, where, tier)


def load_with_tier(load: Load, where: Path, tier: Path) -> Any:
    ioshape.configure(tier=str(tier))
    try:
        return load(where)
    finally:
        ioshape.configure(tier=None)


# ---- Checkpoints of another kind -----------------------------------------------------------------


@pytest.mark.parametrize("load", OF_DIRECTORIES)
def test_a_directory_of_files_asks_for_a_pattern(tmp_path: Path, load: Load) -> None:
    run = tmp_path / "run"
    files(run)
    error = no_usable(load, run)
    assert f'give a pattern: ioshape.load_latest("{run}/step-*.pt")' in error.remedy
    assert ioshape.load_latest(f"{run}/step-*.pt")["number"] == 3


def test_checkpoints_of_another_kind_name_the_call_that_loads_them(tmp_path: Path) -> None:
    groups, of_dcp = tmp_path / "groups", tmp_path / "dcp"
    ioshape.save_group(checkpoint(1), groups, 1)
    save_dcp(of_dcp / "step-1", {"step": 1})
    assert "load_group" in no_usable(load_dcp, groups).remedy
    of_groups: list[Load] = [load_group, load_intact]
    for load in of_groups:
        assert "ioshape.dcp.load_latest()" in no_usable(load, of_dcp).remedy
    with pytest.raises(ValueError, match=r"ioshape\.dcp\.load_latest"):
        ioshape.load_latest(of_dcp)


@pytest.mark.parametrize("load", OF_DIRECTORIES)
def test_a_checkpoint_itself_is_not_the_directory_that_holds_it(tmp_path: Path, load: Load) -> None:
    ioshape.save_group(checkpoint(1), tmp_path, 1)
    save_dcp(tmp_path / "step-7", {"step": 1})
    for name in ("step-0000000001", "step-7"):
        error = no_usable(load, tmp_path / name)
        assert error.remedy == f'give the directory "{tmp_path}"'


def test_a_half_checkpoint_of_stock_dcp_is_something(tmp_path: Path) -> None:
    dcp.save({"step": 1}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    (tmp_path / "step-1" / ".metadata").unlink()
    for load in OF_DIRECTORIES:
        assert "step-1" in str(no_usable(load, tmp_path))


# ---- Checkpoints without permission --------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that any user can reach. pytest's own folders are closed to other users."""
    with tempfile.TemporaryDirectory(prefix="ioshape-first-start-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_nobody(folder: Path, program: str, *arguments: str) -> str:
    """Run a program as another user, and return its output."""
    begin = f"""
        import os, sys
        import ioshape, ioshape.dcp, torch
        import torch.distributed.checkpoint
        ioshape.load_latest, ioshape.latest
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
            os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
        os.environ["HOME"] = "/"
    """
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c"),
            textwrap.dedent(begin) + textwrap.dedent(program),
            *arguments,
        ],
        cwd=folder,
        env=environment(IOSHAPE_COORDINATOR="open"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADS = """
    def tried(load, where):
        try:
            load(where)
        except OSError as error:
            assert isinstance(error, ioshape.StorageError), repr(error)
            return type(error).__name__
        return "loaded"

    def of_directory(where):
        return [
            tried(load, where)
            for load in (
                ioshape.load_latest,
                ioshape.load_group,
                lambda path: ioshape.load_group(path, fallback=True),
                lambda path: ioshape.dcp.load_latest({"step": 0}, path, no_dist=True),
                ioshape.latest,
            )
        ]

    for where in sys.argv[1:]:
        found = [tried(ioshape.load_latest, where)] if ".pt" in where else of_directory(where)
        print(where, *found)
"""


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_no_first_start(open_folder: Path) -> None:
    """Check closed directories: a given one, one that a pattern matches, and a checkpoint."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    for name in ("files", "groups", "dcp", "steps", "others"):
        (open_folder / name).mkdir(mode=0o755)
    files(open_folder / "files")
    ioshape.save_group(checkpoint(1), open_folder / "groups", 1)
    for name in ("dcp", "steps"):
        save_dcp(open_folder / name / "step-1", {"step": 1})
    wanted = {}
    for mode in (0o700, 0o704, 0o701):  # the last bits of the mode apply to the other user
        above = open_folder / f"{mode:o}"
        above.mkdir(mode=0o755)
        for name in ("files", "groups", "dcp"):
            shutil.copytree(open_folder / name, above / name)
            (above / name).chmod(mode)
        wanted[f"{above}/files/step-*.pt"] = ["PermissionError"]
        wanted[f"{above}/fi*/step-*.pt"] = ["PermissionError"]
        wanted[f"{above}/groups"] = wanted[f"{above}/dcp"] = ["PermissionError"] * 5
    wanted[f"{open_folder}/700/files/step-1.pt"] = ["PermissionError"]
    # The directory can be listed, but its checkpoint cannot.
    (open_folder / "steps" / "step-1").chmod(0o700)
    wanted[f"{open_folder}/steps"] = ["PermissionError"] * 5
    # A closed directory that is no checkpoint does no harm.
    (open_folder / "others" / "job-4711").mkdir(mode=0o700)
    wanted[f"{open_folder}/others"] = [*["FileNotFoundError"] * 4, "loaded"]
    said = as_nobody(open_folder, LOADS, *wanted)
    assert {line.split()[0]: line.split()[1:] for line in said.splitlines()} == wanted


# ---- Files that disappear during the search ------------------------------------------------------


def test_a_file_that_goes_while_the_newest_is_looked_for_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a concurrent process that keeps only its newest checkpoint."""
    from ioshape._group import load as newest  # noqa: PLC0415

    ioshape.save(checkpoint(1), tmp_path / "step-1.pt")
    look, looks = newest._newest_first, []

    def look_and_save(pattern: str, folder: str) -> list[str]:
        found = look(pattern, folder)
        looks.append(found)
        if len(looks) == 1:
            ioshape.save(checkpoint(2), tmp_path / "step-2.pt")
            (tmp_path / "step-1.pt").unlink()
        return found

    monkeypatch.setattr(newest, "_newest_first", look_and_save)
    assert ioshape.load_latest(tmp_path / "*.pt")["number"] == 2
    assert len(looks) == 2


# ---- Programs of the documentation ---------------------------------------------------------------


def resuming(page: str) -> list[str]:
    return [one for one in programs(page) if "except FileNotFoundError" in one]


@pytest.mark.long
@pytest.mark.parametrize("harm", [cut, damage])
def test_the_program_of_the_guide_ends_where_all_checkpoints_are_damaged(
    tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    (program,) = resuming("start.md")

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program + 'print("started at", first)\n'],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    first = run()
    assert first.stdout == "started at 0\n", first.stderr
    paths = sorted((tmp_path / "run").iterdir())
    assert paths
    for path in paths:
        harm(path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    again = run()
    assert again.returncode == 1
    assert not again.stdout
    assert re.search(
        r"^ioshape\.errors\.NoUsableCheckpointError: cannot load", again.stderr, re.MULTILINE
    )
    assert sorted((tmp_path / "run").iterdir()) == paths
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths} == before


# ---- Exceptions ----------------------------------------------------------------------------------


def test_tracebacks_name_exceptions_as_programs_do(tmp_path: Path) -> None:
    (tmp_path / "bad-1.pt").write_text("no zip")
    found = {}
    failing: list[tuple[Load, Any]] = [
        (ioshape.load_latest, tmp_path / "*.pt"),
        (ioshape.load_latest, tmp_path / "none-*.pt"),
        (ioshape.verify, tmp_path / "bad-1.pt"),
        (lambda file: ioshape.save({}, file), Path),
    ]
    for load, where in failing:
        with pytest.raises((OSError, TypeError)) as raised:
            load(where)
        error = raised.value
        found[type(error).__name__] = traceback.format_exception_only(error)[-1]
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
    assert found["NoUsableCheckpointError"].startswith(
        "ioshape.errors.NoUsableCheckpointError: cannot"
    )
    assert found["FileNotFoundError"].startswith("FileNotFoundError: cannot")
    assert found["FormatError"].startswith("ioshape.errors.FormatError: ")
    assert found["TypeError"].startswith("TypeError: save() takes a path")
    for name in ioshape.__all__:
        public = getattr(ioshape, name)
        if isinstance(public, type) and issubclass(public, BaseException):
            assert public.__module__ == "ioshape", name
            assert pickle.loads(pickle.dumps(public)) is public


def test_what_was_passed_over_is_sent_along(tmp_path: Path) -> None:
    (tmp_path / "bad-1.pt").write_text("no zip")
    error = no_usable(ioshape.load_latest, tmp_path / "*.pt")
    sent = pickle.loads(pickle.dumps(error))
    assert [one.path for one in sent.passed_over] == [str(tmp_path / "bad-1.pt")]
    assert isinstance(sent.passed_over[0].error, ioshape.errors.FormatError)
