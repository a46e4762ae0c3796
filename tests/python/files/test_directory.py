# SPDX-License-Identifier: Apache-2.0
"""directory(): the files that the block writes appear all at once."""

import os
import stat
from pathlib import Path

import ioshape
import pytest
from ioshape._files import directory as internals
from nodes import run_ranks
from processes import run_interpreter
from records import names_in


def fill(path: Path, *names: str, content: str = "new") -> None:
    with ioshape.directory(path) as folder:
        for name in names:
            file = Path(folder, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
            assert not (path / name).is_file() or (path / name).read_text() != content


def test_it_appears_when_the_block_ends(tmp_path: Path) -> None:
    fill(tmp_path / "above" / "model", "config.json", "inner/weights")
    assert names_in(tmp_path / "above") == ["model"]
    assert names_in(tmp_path / "above" / "model") == ["config.json", "inner"]
    before = os.umask(0o027)
    try:
        fill(tmp_path / "private", "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o750


@pytest.mark.slow
def test_what_a_living_process_fills_outlasts_the_saves_of_others(tmp_path: Path) -> None:
    with ioshape.directory(tmp_path / "model") as folder:
        Path(folder, "config.json").write_text("new")
        run_interpreter(tmp_path, "import ioshape; ioshape.save(1, 'model.pt')")
        assert names_in(Path(folder)) == ["config.json"]
    assert names_in(tmp_path / "model") == ["config.json"]


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    fill(tmp_path / "model", "config.json", content="old")
    with pytest.raises(FileNotFoundError):
        fill(tmp_path / "model", "config.json", "not/there/file")
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert names_in(tmp_path) == ["model"]


@pytest.fixture(params=["exchange", "no exchange", "further directories"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select how the existing directory is replaced, and return the name of the way."""
    if request.param == "no exchange":  # NFS and Lustre cannot exchange names
        monkeypatch.setattr(internals, "_exchange", lambda _one, _other: False)
    return str(request.param)


SHARDED = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def test_what_is_there_is_replaced(way: str, tmp_path: Path) -> None:
    """Check that an old set of weights is removed, and that other files and the mode stay."""
    path = tmp_path / "model"
    fill(path, *SHARDED, INDEX, "notes.txt", "adapter.safetensors", content="old")
    if way == "further directories":
        (path / "checkpoint-1").mkdir()
    path.chmod(0o710)
    inode = path.stat().st_ino
    fill(path, "model.safetensors", "config.json", "inner/state")
    expected = ["adapter.safetensors", "config.json", "inner", "model.safetensors", "notes.txt"]
    further = ["checkpoint-1"] if way == "further directories" else []
    assert names_in(path) == sorted([*expected, *further])
    assert (path.stat().st_ino != inode) == (way == "exchange")
    fill(path, *SHARDED, INDEX, "inner/state", content="newest")
    kept = [name for name in expected if name != "model.safetensors"]
    assert names_in(path) == sorted([*kept, *SHARDED, INDEX, *further])
    assert (path / "inner" / "state").read_text() == "newest"
    assert (path / "notes.txt").read_text() == "old"
    assert stat.S_IMODE(path.stat().st_mode) == 0o710
    assert names_in(tmp_path) == ["model"]


def test_what_is_in_further_directories_stays(way: str, tmp_path: Path) -> None:
    """Check nested directories. A file may replace a directory, and a directory a file."""
    path = tmp_path / "out"
    fill(path, "logs/a.txt", "logs/again", "set/" + SHARDED[0], "set/" + INDEX, content="old")
    fill(path, "turned/file", "turns", content="old")
    if way == "further directories":
        (path / "logs" / "run").mkdir()
    fill(path, "logs/b.txt", "logs/again", "set/model.safetensors", "turned", "turns/file")
    further = ["run"] if way == "further directories" else []
    assert names_in(path / "logs") == ["a.txt", "again", "b.txt", *further]
    assert (path / "logs" / "again").read_text() == "new"
    assert names_in(path / "set") == ["model.safetensors"]
    assert (path / "turned").read_text() == (path / "turns" / "file").read_text() == "new"
    assert names_in(tmp_path) == ["out"]


def test_what_others_write_there_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    fill(path, "again", "model.safetensors", "notes.txt", content="old")
    exchange = internals._exchange

    def late(one: str, other: str) -> bool:
        (path / "late").write_text("theirs")
        return exchange(one, other)

    monkeypatch.setattr(internals, "_exchange", late)
    fill(path, "again", *SHARDED, INDEX)
    assert names_in(path) == sorted(["again", "late", *SHARDED, INDEX, "notes.txt"])


def test_a_save_under_way_into_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out"
    fill(path, "config.json", content="old")
    with ioshape.open(path / "opt.pt", "wb") as file:
        file.write(b"theirs")
        fill(path, "config.json")
    assert names_in(path) == ["config.json", "opt.pt"]


@pytest.mark.slow
def test_one_of_several_ranks_leaves_the_directory_the_one_it_is(tmp_path: Path) -> None:
    """Check that the directory keeps its inode: another rank may be about to write there."""
    fill(tmp_path / "out", "config.json", content="old")
    program = """
        from group_program import *
        import os
        inode = os.stat(arguments[0]).st_ino
        if rank == 0:
            with ioshape.directory(arguments[0]) as folder:
                open(folder + "/new", "w").close()
        say("done", same=os.stat(arguments[0]).st_ino == inode)
    """
    for lines in run_ranks(tmp_path, program, tmp_path / "out", ranks=2, nodes=1):
        assert lines[-1]["same"]
    assert names_in(tmp_path / "out") == ["config.json", "new"]


def test_shards_are_never_seen_beside_an_index_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check filesystems that cannot exchange directories."""
    monkeypatch.setattr(internals, "_exchange", lambda _one, _other: False)
    path = tmp_path / "model"
    fill(path, *SHARDED, INDEX, content="old")
    move, seen = internals.NewDirectory._move, []

    def watched(self: internals.NewDirectory, one: str, other: str) -> None:
        move(self, one, other)
        if (path / INDEX).exists():
            seen.append({(path / name).read_text() for name in (*SHARDED, INDEX)})

    monkeypatch.setattr(internals.NewDirectory, "_move", watched)
    fill(path, *SHARDED, INDEX)
    assert seen == [{"new"}]


def test_the_current_directory_stays_the_one_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    inode = tmp_path.stat().st_ino
    fill(tmp_path, "file")
    assert tmp_path.stat().st_ino == inode
    assert names_in(Path.cwd()) == ["file", "notes.txt"]


def test_a_link_stays_and_files_without_links_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "model", "notes.txt", content="old")
    (tmp_path / "link").symlink_to("model")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    fill(tmp_path / "link", "config.json")
    assert (tmp_path / "link").is_symlink()
    assert names_in(tmp_path / "model") == ["config.json", "notes.txt"]


def test_what_is_no_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        fill(tmp_path / "file", "config.json")
    assert names_in(tmp_path) == ["file"]


SYNCED = """
    import os
    import sys
    from pathlib import Path

    import ioshape

    synced, sync = [], os.fsync

    def watched(fd):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    os.fsync = watched
    with ioshape.directory("model", durable=sys.argv[1] == "yes") as folder:
        Path(folder, "inner").mkdir()
        Path(folder, "inner", "state").write_text("new")
        Path(folder, "config.json").write_text("new")
        Path(folder, "link").symlink_to("config.json")
    print(sorted(name for name in synced if not name.startswith(".")))
"""


@pytest.mark.parametrize("durable", ["yes", "no"])
def test_all_files_are_synced(durable: str, tmp_path: Path) -> None:
    said = run_interpreter(tmp_path, SYNCED, durable).stdout
    expected = ["config.json", "inner", "state"] if durable == "yes" else []
    assert said == f"{expected}\n"


def test_what_a_killed_process_left_goes_with_the_next_saves_bit_by_bit(tmp_path: Path) -> None:
    """Check that a save removes 10,000 entries at most, so that it does not wait longer."""
    run_interpreter(
        tmp_path,
        """
        import os, signal, sys, ioshape
        with ioshape.directory(sys.argv[1]) as folder:
            for number in range(10_500):
                os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY))
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "download",
        status=-9,
    )
    (left,) = tmp_path.glob(".download*")
    counts = [10_500]
    while left.exists():
        ioshape.save({"step": len(counts)}, tmp_path / "model.pt")
        counts.append(len(list(left.iterdir())) if left.exists() else 0)
        assert 0 < counts[-2] - counts[-1] <= 10_000 or not left.exists()
    assert len(counts) > 2
