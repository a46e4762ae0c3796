# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks as their readers see them: the Python functions and the commands."""

import json
import os
import pickle
import pty
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import ioshape
import pytest
import torch
from command import IOSHAPE, call, succeed
from processes import TIMEOUT_S
from records import flip
from tree import build_folder

RANKS = 3
MODES = ["each", "rank0"]


def state(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(100000.0) + 1000 * step + rank,
        "rank": torch.tensor(rank),
    }


def write(runs: Path, step: int, mode: str = "rank0", *, by_torch: bool = False) -> None:
    """Write a checkpoint as a group does."""
    folder = runs.parent / "parts"
    folder.mkdir(exist_ok=True)
    files = [folder / f"{rank}.pt" for rank in range(RANKS)]
    for rank, file in enumerate(files):
        (torch.save if by_torch else ioshape.save)(state(step, rank), file)
    subprocess.run(
        (build_folder() / "tests" / "c" / "checkpoint", "write", runs, str(step), mode, *files),
        check=True,
    )


@contextmanager
def attempt(runs: Path, step: int, *, kill: bool = False) -> Iterator[Path]:
    """Yield the path of an attempt that is being written, or whose writer is dead if `kill`."""
    process = subprocess.Popen(
        (build_folder() / "tests" / "c" / "checkpoint", "begin", runs, str(step)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    path = Path(process.stdout.readline().rstrip("\n"))
    if kill:
        process.kill()
        process.wait()
    yield path
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


# ---- The functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_latest_is_the_newest_complete_one(runs: Path, mode: str) -> None:
    before = datetime.now(tz=timezone.utc).replace(microsecond=0)
    for step in (10, 5, 20):
        write(runs, step, mode)
    newest = ioshape.latest(runs)
    assert newest is not None
    assert (newest.step, newest.path) == (20, str(runs / "step-0000000020"))
    assert (newest.mode, newest.ranks) == (mode, RANKS)
    assert newest.files == (RANKS if mode == "each" else 1)
    files = [file for file in Path(newest.path).iterdir() if file.name != "manifest.json"]
    assert len(files) == newest.files
    assert newest.n_bytes == sum(file.stat().st_size for file in files)
    assert before <= newest.saved <= datetime.now(tz=timezone.utc)
    assert [one.step for one in ioshape.checkpoints(str(runs))] == [10, 5, 20]
    (runs / "step-0000000020" / "manifest.json").unlink()
    again = ioshape.latest(runs)
    assert again is not None
    assert again.step == 5
    assert [one.step for one in ioshape.checkpoints(runs)] == [10, 5]
    with pytest.raises(FileNotFoundError):
        newest.load(0)
    assert pickle.loads(pickle.dumps(newest)) == newest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_torch", [False, True])
def test_every_rank_loads_its_part(runs: Path, mode: str, by_torch: bool) -> None:
    write(runs, 7, mode, by_torch=by_torch)
    newest = ioshape.latest(runs)
    assert newest is not None
    told: list[ioshape.types.Progress] = []
    for rank in range(RANKS):
        assert same(newest.load(rank), state(7, rank))
        loaded = newest.load(rank, "cpu", weights_only=True, verify=False, progress=told.append)
        assert same(loaded, state(7, rank))
    assert told
    assert told[-1].done_bytes <= told[-1].total_bytes < newest.n_bytes
    with pytest.raises(FileNotFoundError):
        newest.load(RANKS)
    with pytest.raises(ValueError, match="ranks count from 0"):
        newest.load(-1)


def test_mmap_is_for_files(runs: Path) -> None:
    write(runs, 1, "each")
    write(runs, 2, "rank0")
    first, second = ioshape.checkpoints(runs)
    assert same(first.load(1, mmap=True), state(1, 1))
    with pytest.raises(ValueError, match="ioshape extract"):
        second.load(1, mmap=True)


@pytest.mark.parametrize("mode", MODES)
def test_damage_is_named(runs: Path, mode: str) -> None:
    write(runs, 7, mode)
    newest = ioshape.latest(runs)
    assert newest is not None
    newest.verify()
    part = newest.shards()[1]
    record = next(
        record
        for record in ioshape.inspect(runs.parent / "parts" / "1.pt").records
        if record.n_bytes == 400000
    )
    flip(Path(part.file), part.offset + record.file_offset + 1000)
    with pytest.raises(ioshape.DamagedError, match="which holds 'weight'"):
        newest.load(1)
    assert same(newest.load(0), state(7, 0))
    told: list[ioshape.types.Progress] = []
    with pytest.raises(ioshape.DamagedError) as damaged:
        newest.verify(progress=told.append)
    assert damaged.value.rank == 1
    assert told


def test_an_exception_in_progress_stops_it(runs: Path) -> None:
    def stop(_progress: ioshape.types.Progress) -> None:
        raise ArithmeticError

    write(runs, 7)
    newest = ioshape.latest(runs)
    assert newest is not None
    with pytest.raises(ArithmeticError):
        newest.verify(progress=stop)
    with pytest.raises(ArithmeticError):
        newest.load(0, progress=stop)


def test_prune(runs: Path) -> None:
    for step in range(1, 7):
        write(runs, step)
    assert ioshape.prune(runs, keep_last=2, keep_every=3, dry_run=True) == [1, 2, 4]
    assert len(ioshape.checkpoints(runs)) == 6
    assert ioshape.prune(runs, keep_last=2, keep_every=3) == [1, 2, 4]
    assert [one.step for one in ioshape.checkpoints(runs)] == [3, 5, 6]
    assert ioshape.prune(runs, keep_last=10) == []
    with pytest.raises(ValueError, match="keep_last is 0"):
        ioshape.prune(runs, keep_last=0)
    with pytest.raises(ValueError, match="keep_every is -1"):
        ioshape.prune(runs, keep_last=1, keep_every=-1)
    with pytest.raises(FileNotFoundError):
        ioshape.prune(runs / "nowhere", keep_last=1)


# ---- The commands --------------------------------------------------------------------------------


def test_ls(runs: Path) -> None:
    runs.mkdir()
    # The command prints the resolved path instead of ".".
    assert str(runs) in succeed(call("ls", ".", folder=runs))
    write(runs, 7, "each")
    write(runs, 8)
    with attempt(runs, 9) as path:
        rows = [line.split() for line in succeed(call("ls", runs)).splitlines()]
        listed = json.loads(succeed(call("ls", "--json", runs)))
    assert rows[0] == ["step", "saved", "mode", "ranks", "files", "size", "state"]
    assert [row[0] for row in rows[1:]] == ["7", "8", "9"]
    assert [row[3:6] for row in rows[1:3]] == [["each", "3", "3"], ["rank0", "3", "1"]]
    assert [" ".join(row[8:]) for row in rows[1:]] == ["complete", "complete", "being written"]
    assert [one["step"] for one in listed["checkpoints"]] == [7, 8]
    assert listed["unfinished"][0]["path"] == str(path)
    assert listed["unfinished"][0]["alive"] is True
    assert listed["damaged"] == []


def test_ls_tells_the_dead_and_the_damaged(runs: Path) -> None:
    write(runs, 7)
    write(runs, 8)
    flip(runs / "step-0000000008" / "manifest.json", 60)
    (runs / "step-0000000009").mkdir()
    with attempt(runs, 10, kill=True) as path:
        done = call("ls", runs)
        listed = json.loads(call("ls", "--json", runs).stdout)
    assert done.returncode == 1
    assert "left by a dead process" in done.stdout
    assert len(done.stderr.splitlines()) == 2
    assert listed["unfinished"][0]["alive"] is False
    assert [Path(one["path"]).name for one in listed["damaged"]] == [
        "step-0000000008",
        "step-0000000009",
    ]
    # `ioshape ls` promises that the next save removes what the dead process left.
    write(runs, 11)
    assert not path.exists()


@pytest.mark.wording
def test_sentences_name_what_they_are_about(tmp_path: Path, runs: Path) -> None:
    for step in (7, 8):
        write(runs, step)
    flip(runs / "step-0000000007" / "ranks.zip", 100000)
    assert "ranks.zip" in call("verify", "--all", runs).stdout.splitlines()[0]
    assert "step 5" in call("verify", "--step", "5", runs).stdout
    assert "none of rank 3" in call("extract", runs, "--rank", "3").stderr
    (tmp_path / "rank-00001.pt").touch()
    assert "rank-00001.pt" in call("extract", runs, "--rank", "1", folder=tmp_path).stderr
    flip(runs / "step-0000000008" / "manifest.json", 60)
    (runs / "step-0000000009").mkdir()
    listed = call("ls", runs).stderr
    assert "step-0000000008" in listed
    assert "step-0000000009 has no manifest" in listed


@pytest.mark.slow
def test_verify(runs: Path) -> None:
    for step in (7, 8, 9):
        write(runs, step)
    names = [runs / f"step-{step:010}" for step in (7, 8, 9)]
    assert succeed(call("verify", runs)).startswith(f"{names[2]}: ok, ")
    assert succeed(call("verify", "--step", "7", runs)).startswith(f"{names[0]}: ok, ")
    assert succeed(call("verify", names[1])).startswith(f"{names[1]}: ok, ")
    assert succeed(call("verify", ".", folder=names[1])).startswith(f"{names[1]}: ok, ")
    assert len(succeed(call("verify", "--all", runs)).splitlines()) == 3
    flip(names[0] / "ranks.zip", 100000)
    assert succeed(call("verify", "-q", runs)) == ""
    done = call("verify", "--all", runs)
    assert done.returncode == 1
    outcomes = json.loads(call("verify", "--all", "--json", runs).stdout)
    assert [one["state"] for one in outcomes] == ["damaged", "ok", "ok"]
    done = call("verify", "--step", "5", runs)
    assert done.returncode == 1
    assert done.stdout
    assert call("verify", "--all", "--step", "5", runs).returncode == 2


def test_verify_of_a_directory_without_checkpoints(tmp_path: Path) -> None:
    done = call("verify", tmp_path)
    assert done.returncode == 1
    assert "name the files in it" in done.stdout
    (tmp_path / "step-0000000007").mkdir()
    assert "has no manifest" in call("verify", tmp_path).stdout


@pytest.mark.slow
def test_ls_knows_where_a_checkpoint_is_however_the_directory_is_written(runs: Path) -> None:
    write(runs, 7)
    (runs.parent / "link").symlink_to(runs)
    for name in (runs.name, f"./{runs.name}/", str(runs), "link"):
        told = succeed(call("ls", name, folder=runs.parent))
        assert told.splitlines()[-1].endswith("complete"), told
        (one,) = json.loads(succeed(call("ls", "--json", name, folder=runs.parent)))["checkpoints"]
        assert one["state"] == "complete"


@pytest.mark.slow
def test_prune_by_command(runs: Path) -> None:
    for step in range(1, 5):
        write(runs, step)
    found = json.loads(succeed(call("prune", runs, "--keep-last", "2", "--dry-run", "--json")))
    assert [one["step"] for one in found["checkpoints"]] == [1, 2]
    assert len(ioshape.checkpoints(runs)) == 4
    # Without a terminal the command cannot ask for confirmation.
    assert call("prune", runs, "--keep-last", "2").returncode == 2
    assert len(ioshape.checkpoints(runs)) == 4
    found = json.loads(succeed(call("prune", runs, "--keep-last", "2", "--yes", "--json")))
    assert [one["step"] for one in found["checkpoints"]] == [1, 2]
    assert [one.step for one in ioshape.checkpoints(runs)] == [3, 4]
    assert call("prune", runs).returncode == 2
    assert call("prune", runs, "--keep-last", "0").returncode == 2
    assert "does not exist" in call("prune", runs / "x", "--keep-last", "1").stderr


@pytest.mark.parametrize("answer", ["n", "y"])
def test_prune_asks_on_a_terminal(runs: Path, answer: str) -> None:
    for step in (1, 2):
        write(runs, step)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [IOSHAPE, "prune", runs, "--keep-last", "1"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    asked = b""
    while b"?" not in asked:
        asked += os.read(ours, 1000)
    assert b"Remove 1 checkpoint" in asked
    os.write(ours, f"{answer}\n".encode())
    process.communicate(timeout=TIMEOUT_S)
    os.close(ours)
    assert process.returncode == (answer == "n")
    assert len(ioshape.checkpoints(runs)) == (2 if answer == "n" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_extract(tmp_path: Path, runs: Path, mode: str) -> None:
    write(runs, 7, mode)
    write(runs, 8, mode)
    folder = tmp_path / "here"
    folder.mkdir()
    assert "rank-00001.pt" in succeed(call("extract", runs, "--rank", "1", folder=folder))
    assert same(torch.load(folder / "rank-00001.pt"), state(8, 1))
    done = call("extract", runs, "--rank", "1", folder=folder)
    assert done.returncode == 1
    assert done.stderr
    arguments = ("extract", runs, "--rank", "1", "--step", "7", "--force")
    succeed(call(*arguments, folder=folder))
    assert same(torch.load(folder / "rank-00001.pt"), state(7, 1))
    succeed(call("extract", runs, "--rank", "2", "-o", tmp_path / "two.pt"))
    assert same(torch.load(tmp_path / "two.pt"), state(8, 2))
    succeed(call("extract", runs, "--all", "-o", tmp_path / "a" / "b"))
    for rank in range(RANKS):
        assert same(torch.load(tmp_path / "a" / "b" / f"rank-{rank:05}.pt"), state(8, rank))
    done = call("extract", runs, "--rank", "3")
    assert done.returncode == 1
    assert done.stderr
    assert call("extract", runs).returncode == 2
    assert call("extract", runs, "--all", "--rank", "1").returncode == 2


def test_extract_writes_nothing_that_is_damaged(tmp_path: Path, runs: Path) -> None:
    write(runs, 7, by_torch=True)
    newest = ioshape.latest(runs)
    assert newest is not None
    part = newest.shards()[1]
    # The damaged byte is padding: no record's checksum covers it, only the manifest's does.
    with zipfile.ZipFile(part.file) as bundle:
        data = bundle.read(part.name)
    flip(Path(part.file), part.offset + data.index(b"ZZZZ"))
    done = call("extract", runs, "--rank", "1", "-o", tmp_path / "out.pt")
    assert done.returncode == 1
    assert "damaged" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "runs"]


def test_commands_want_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in (("ls",), ("prune", "--keep-last", "1"), ("extract", "--rank", "0")):
        done = call(*command, tmp_path / "nowhere")
        assert done.returncode == 1
        assert "does not exist" in done.stderr
        done = call(*command, tmp_path / "file")
        assert done.returncode == 1
        assert "is not a directory" in done.stderr


def test_a_copy_of_a_directory_is_as_good(tmp_path: Path, runs: Path) -> None:
    write(runs, 7)
    shutil.copytree(runs, tmp_path / "copy")
    newest = ioshape.latest(tmp_path / "copy")
    assert newest is not None
    newest.verify()
