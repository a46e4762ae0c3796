# SPDX-License-Identifier: Apache-2.0
"""save_group, save_group_async and load_group with ranks that are processes of this host."""

import errno
import os
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import ioshape
import pytest
from coordinators import coordinator
from ioshape._core import comm
from ioshape._native import ffi
from nodes import run_ranks, started_ranks
from processes import run_program

MODES = ["each", "node", "rank0"]

BEGIN = "from group_program import *\n"


def checkpoints_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints.

    Check that the folder has no other entries but the stores of dead jobs.
    """
    steps = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".ioshape-store-"):
            continue  # another save removes it after a day
        assert entry.name.startswith("step-"), entry.name
        assert (entry / "manifest.json").is_file()
        steps.append(int(entry.name.removeprefix("step-")))
    return steps


EXPLAIN = """
def explain(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        say("raised", kinds=[kind.__name__ for kind in type(error).__mro__],
            path=str(getattr(error, "filename", "")), failed=getattr(error, "rank", None))
    else:
        say("raised", kinds=[])
"""


# ---- Complete checkpoints ------------------------------------------------------------------------

SAVE_AND_LOAD = (
    BEGIN
    + """
if arguments[2:]:
    set_up_distributed()
directory, mode = arguments[:2]
for step in (5, 1000):
    report = ioshape.save_group(object_of(rank, step), directory, step, mode=mode)
    say("saved", step=step, layout=report.mode, why=report.why,
        path=report.path, bytes=report.file_bytes, all=report.checkpoint_bytes)
found = ioshape.load_group(directory, weights_only=True)
say("loaded", right=is_right(found, rank, 1000))
say("older", right=is_right(ioshape.load_group(directory, step=5), rank, 5))
"""
)


@pytest.mark.parametrize(
    ("mode", "store"),
    [("each", "files"), ("each", "host"), ("node", "redis"), ("node", "files"), ("rank0", "host")],
)
@pytest.mark.slow
def test_what_all_ranks_save_they_load(tmp_path: Path, mode: str, store: str) -> None:
    folder = tmp_path / "run"
    with coordinator("redis" if store == "redis" else "local") as address:
        said = run_ranks(
            *(tmp_path, SAVE_AND_LOAD, folder, mode),
            *(["gloo"] if mode == "rank0" else []),
            ranks=4,
            nodes=2,
            IOSHAPE_TEST_STORE=store,
            IOSHAPE_COORDINATOR=address,
        )
    for lines in said:
        saved = [line for line in lines if line["event"] == "saved"]
        assert [line["layout"] for line in saved] == [mode, mode]
        assert all(line["why"] for line in saved)
        assert all(line["path"] == str(folder / f"step-{line['step']:010d}") for line in saved)
        assert all(0 < line["bytes"] <= line["all"] for line in saved)
        assert [line["right"] for line in lines if "right" in line] == [True, True]
    files = sorted(path.name for path in (folder / "step-0000001000").iterdir())
    parts = {
        "each": [f"rank-0000{rank}.pt" for rank in range(4)],
        "node": ["node-00000.zip", "node-00001.zip"],
        "rank0": ["ranks.zip"],
    }
    assert files == ["manifest.json", *parts[mode]]
    assert checkpoints_in(folder) == [5, 1000]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_stock_torch_reads_what_unzip_takes_out(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "run"
    run_ranks(tmp_path, SAVE_AND_LOAD, folder, mode, ranks=3)
    out = tmp_path / "out"
    out.mkdir()
    for file in sorted((folder / "step-0000001000").iterdir()):
        if file.suffix == ".zip":
            assert subprocess.run(["unzip", "-tq", file], check=False).returncode == 0
            subprocess.run(["unzip", "-q", file, "-d", out], check=True)
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None
                for member in archive.infolist():
                    assert member.compress_type == zipfile.ZIP_STORED
        elif file.suffix == ".pt":
            file.rename(out / file.name)
    names = [f"rank-0000{rank}.pt" for rank in range(3)]
    assert sorted(path.name for path in out.iterdir()) == names
    run_program(tmp_path, STOCK, out)


STOCK = """
import sys
from pathlib import Path

import torch

for rank in range(3):
    for options in ({"weights_only": True}, {"weights_only": False}, {"mmap": True}):
        found = torch.load(Path(sys.argv[1]) / f"rank-0000{rank}.pt", **options)
        generator = torch.Generator().manual_seed(1_000_003 * 1000 + rank)
        data = torch.randint(0, 256, (20_000,), dtype=torch.uint8, generator=generator)
        assert torch.equal(found["data"], data)
        assert torch.equal(found["view"], data[10_000:])
        assert found["view"].untyped_storage().data_ptr() == found["data"].data_ptr()
        assert torch.equal(found["weights"], torch.randn(33, 7, generator=generator))
assert "ioshape" not in sys.modules
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_parts_of_all_sizes(tmp_path: Path, mode: str) -> None:
    """Check uneven and empty shards, and one rank with a hundred times the bytes of the others."""
    folder = tmp_path / "run"
    said = run_ranks(
        tmp_path,
        BEGIN
        + """
sizes = [50_000, 5_000_001, 1, 65_536, 0]
directory, mode = arguments
own = object_of(rank, 1, sizes[rank]) if sizes[rank] else {}
ioshape.save_group(own, directory, 1, mode=mode)
ioshape.save_group_async(object_of(rank, 2, sizes[-rank]), directory, 2, mode=mode).wait()
found = ioshape.load_group(directory, step=1)
right = is_right(found, rank, 1, sizes[rank]) if sizes[rank] else found == {}
say("loaded", right=right, last=is_right(ioshape.load_group(directory), rank, 2, sizes[-rank]))
for other in range(ranks):
    found = ioshape.load_group(directory, step=2, rank=other)
    say("other", right=is_right(found, other, 2, sizes[-other]))
""",
        folder,
        mode,
        ranks=5,
    )
    assert [line.get("right") for lines in said for line in lines] == [True] * 30
    assert [lines[0]["last"] for lines in said] == [True] * 5


def test_a_job_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = run_ranks(
        tmp_path,
        BEGIN
        + """
for mode in ("auto", "each", "node", "rank0"):
    report = ioshape.save_group(object_of(0, 7), arguments[0], 7, mode=mode)
    say(mode, layout=report.mode, right=is_right(ioshape.load_group(arguments[0]), 0, 7))
""",
        folder,
        ranks=1,
    )
    assert [line["right"] for line in said[0]] == [True] * 4
    assert checkpoints_in(folder) == [7]


# ---- Background saves ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_in_the_background_the_object_may_change_at_once(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "run"
    said = run_ranks(
        tmp_path,
        BEGIN
        + """
directory, mode = arguments
handles = []
for step in range(1, 6):
    state = object_of(rank, step, 3_000_000)
    handles.append(ioshape.save_group_async(state, directory, step, mode=mode))
    state["data"].zero_()
    state["weights"].fill_(-1)
for step, handle in enumerate(handles, start=1):
    report = handle.result()
    say("saved", path=handle.path, done=handle.done(), layout=report.mode)
for step in range(1, 6):
    found = ioshape.load_group(directory, step=step)
    say("loaded", right=is_right(found, rank, step, 3_000_000))
""",
        folder,
        mode,
        ranks=3,
    )
    assert [line["right"] for lines in said for line in lines if "right" in line] == [True] * 15
    assert checkpoints_in(folder) == [1, 2, 3, 4, 5]


def test_the_end_of_the_program_waits_for_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = (
        BEGIN
        + """
ioshape.save_group_async(object_of(rank, 3, 5_000_000), arguments[0], 3)
ioshape.save_group_async(object_of(rank, 4, 5_000_000), arguments[0], 4)
time.sleep(0.3 * rank)
"""
    )
    run_ranks(tmp_path, program, folder, ranks=3, nodes=3)
    assert checkpoints_in(folder) == [3, 4]
    assert not list(folder.glob(".*"))  # the ranks have closed the group and removed its store
    loaded = "say('loaded', right=is_right(ioshape.load_group(arguments[0]), rank, 4, 5_000_000))"
    said = run_ranks(tmp_path, BEGIN + loaded, folder, ranks=3)
    assert [line["right"] for lines in said for line in lines] == [True] * 3


# ---- Failures of one rank ------------------------------------------------------------------------

# Saves steps 1 to 3 and reports what each call raises. WHAT_HAPPENS prepares a failure of rank 2 in
# step 2.
ONE_FAILS = (
    BEGIN
    + """
import threading

directory, how, mode = arguments
size = 400_000

def attempt(step, state, **options):
    try:
        if how == "async":
            ioshape.save_group_async(state, directory, step, mode=mode, **options).wait()
        else:
            ioshape.save_group(state, directory, step, mode=mode, **options)
        error = None
    except BaseException as raised:
        error = raised
    kinds = [kind.__name__ for kind in type(error).__mro__]
    say("tried", step=step, kinds=kinds, failed=getattr(error, "rank", None))

attempt(1, object_of(rank, 1, size))
state = object_of(rank, 2, size)
options = {}
if rank == 2:
    WHAT_HAPPENS
attempt(2, state, **options)
AFTERWARDS
attempt(3, object_of(rank, 3, size))
found = ioshape.load_group(directory)
say("loaded", right=is_right(found, rank, 3, size))
"""
)


def one_fails(
    folder: Path,
    what: str,
    *,
    how: str = "sync",
    mode: str = "each",
    afterwards: str = "",
    **more: Any,
) -> list[dict[str, Any]]:
    """Return what each rank reports of step 2. Check that steps 1 and 3 succeed on all ranks."""
    program = ONE_FAILS.replace("WHAT_HAPPENS", what).replace("AFTERWARDS", afterwards)
    said = run_ranks(folder, program, folder / "run", how, mode, ranks=4, nodes=2, **more)
    for lines in said:
        by_step = {line["step"]: line for line in lines if line["event"] == "tried"}
        for step in (1, 3):
            assert by_step[step]["kinds"][0] == "NoneType", by_step[step]
        assert lines[-1] == {"event": "loaded", "rank": lines[-1]["rank"], "right": True}
    entries = sorted(path.name for path in (folder / "run").iterdir())
    assert [name for name in entries if "step" in name] == ["step-0000000001", "step-0000000003"]
    return [line for lines in said for line in lines if line.get("step") == 2]


def others_name_it(tried: list[dict[str, Any]]) -> None:
    for line in tried:
        if line["rank"] != 2:
            assert "StorageError" in line["kinds"], line
            assert line["failed"] == 2, line


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("mode", ["each", "node"])
@pytest.mark.slow
def test_an_object_that_cannot_be_pickled(tmp_path: Path, mode: str, how: str) -> None:
    tried = one_fails(tmp_path, "state['lock'] = threading.Lock()", how=how, mode=mode)
    assert tried[2]["kinds"][0] == "TypeError", tried[2]
    others_name_it(tried)


@pytest.mark.parametrize("mode", ["each", "node"])
@pytest.mark.slow
def test_a_callback_that_raises(tmp_path: Path, mode: str) -> None:
    what = "options['progress'] = lambda _: 1 // 0"
    tried = one_fails(tmp_path, what, mode=mode)
    assert tried[2]["kinds"][0] == "ZeroDivisionError", tried[2]
    others_name_it(tried)


def test_a_callback_that_raises_while_the_save_is_staged(tmp_path: Path) -> None:
    """Check that the call itself informs the other ranks, because the save has no thread yet."""
    what = "options['progress'] = lambda now: 1 // (now.phase != 'stage')"
    tried = one_fails(tmp_path, what, how="async")
    assert tried[2]["kinds"][0] == "ZeroDivisionError", tried[2]
    others_name_it(tried)


def test_ctrl_c_on_one(tmp_path: Path) -> None:
    what = """options['progress'] = lambda now: (
        time.sleep(2) if now.phase == "write" else None)
    signal = __import__("signal")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()"""
    tried = one_fails(tmp_path, what)
    assert tried[2]["kinds"][0] == "KeyboardInterrupt", tried[2]
    others_name_it(tried)


def test_what_torch_must_pickle_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = run_ranks(
        tmp_path,
        BEGIN
        + """
from ioshape._save import pickling
if rank == 1:
    pickling._probed = "a torch of next year"
report = ioshape.save_group(object_of(rank, 1, 1_000_000), arguments[0], 1)
found = ioshape.load_group(arguments[0], weights_only=True)
say("done", right=is_right(found, rank, 1, 1_000_000), downgrades=report.downgrades)
""",
        folder,
    )
    assert [lines[0]["right"] for lines in said] == [True, True]
    assert "a torch of next year" in said[1][0]["downgrades"][0]
    assert not any("next year" in note for note in said[0][0]["downgrades"])


@pytest.mark.parametrize(
    ("victim", "mode"),
    [
        (0, "each"),
        (2, "node"),
        (3, "rank0"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in ((3, "each"), (1, "node"), (0, "rank0"))
        ),
    ],
)
@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path: Path, mode: str, victim: int) -> None:
    """Kill a rank of each role.

    Rank 0 leads the job and its node, rank 2 leads the other node, ranks 1 and 3 follow.
    """
    folder = tmp_path / "run"
    program = (
        BEGIN
        + """
if arguments[1] == "rank0":
    set_up_distributed()
for step in range(1, 10_000):
    try:
        ioshape.save_group(object_of(rank, step, 2_000_000), arguments[0], step, mode=arguments[1],
                           keep_last=2)
    except Exception as error:
        say("failed", failed=error.rank)
        break
    say("saved", step=step)
os._exit(0)
"""
    )
    more = {"ranks": 4, "nodes": 2, "IOSHAPE_DEADLINE_MS": "3000"}
    with started_ranks(tmp_path, program, folder, mode, **more) as job:  # type: ignore[arg-type]
        job.await_all("saved")
        job.members[victim].process.kill()
        said = job.end(victim)
    saved = max(line["step"] for lines in said for line in lines if line["event"] == "saved")
    for rank, lines in enumerate(said):
        if rank != victim:
            assert lines[-1] == {"event": "failed", "rank": rank, "failed": victim}
    # The newest checkpoint is complete. The next job resumes from it and removes what the dead job
    # left.
    after = (
        BEGIN
        + """
found = ioshape.load_group(arguments[0])
say("loaded", step=found["step"], right=is_right(found, rank, found["step"], 2_000_000))
ioshape.save_group(object_of(rank, 20_000), arguments[0], 20_000)
"""
    )
    said = run_ranks(tmp_path, after, folder, ranks=4, nodes=2)
    assert [lines[0]["right"] for lines in said] == [True] * 4
    assert {lines[0]["step"] for lines in said} in ({saved}, {saved + 1})
    assert checkpoints_in(folder)[-1] == 20_000


def test_a_rank_that_dies_before_all_are_connected(tmp_path: Path) -> None:
    """Check a death before the first group sets up gloo, which carries the bytes between nodes."""
    program = (
        BEGIN
        + EXPLAIN
        + """
set_up_distributed()
torch.distributed.barrier()
if rank == 2:
    os.kill(os.getpid(), 9)
explain(ioshape.save_group, {}, arguments[0], 1, mode="rank0")
os._exit(0)
"""
    )
    more = {"ranks": 4, "nodes": 2, "IOSHAPE_DEADLINE_MS": "2000"}
    with started_ranks(tmp_path, program, tmp_path / "run", **more) as job:  # type: ignore[arg-type]
        said = job.end(2)
    for lines in (said[0], said[1], said[3]):
        assert "StorageError" in lines[0]["kinds"], lines[0]


# ---- Choosing a checkpoint -----------------------------------------------------------------------


def test_no_checkpoint_there(tmp_path: Path) -> None:
    program = (
        BEGIN
        + EXPLAIN
        + """
explain(ioshape.load_group, arguments[0])
explain(ioshape.load_group, arguments[0], step=3)
"""
    )
    for ranks in (1, 2):
        for lines in run_ranks(tmp_path, program, tmp_path / "run", ranks=ranks):
            for line in lines:
                assert "FileNotFoundError" in line["kinds"], line
                assert "StorageError" in line["kinds"], line
                assert line["path"] == str(tmp_path / "run")


def test_another_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saved = "ioshape.save_group(object_of(rank, 1), arguments[0], 1, mode='node')"
    run_ranks(tmp_path, BEGIN + saved, folder, ranks=3)
    program = (
        BEGIN
        + EXPLAIN
        + """
explain(ioshape.load_group, arguments[0])
explain(ioshape.load_group, arguments[0], rank=3)
for other in range(3):
    found = ioshape.load_group(arguments[0], rank=other)
    say("other", right=is_right(found, other, 1))
"""
    )
    for ranks in (1, 2):
        for lines in run_ranks(tmp_path, program, folder, ranks=ranks):
            assert lines[0]["kinds"][0] == "ValueError"
            assert lines[1]["kinds"][0] == "ValueError"
            assert [line["right"] for line in lines[2:]] == [True] * 3


def test_a_complete_checkpoint_is_replaced_or_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = (
        BEGIN
        + EXPLAIN
        + """
ioshape.save_group(object_of(rank, 1), arguments[0], 9)
explain(ioshape.save_group, object_of(rank, 2), arguments[0], 9, replace=False)
say("kept", right=is_right(ioshape.load_group(arguments[0]), rank, 1))
ioshape.save_group(object_of(rank, 2), arguments[0], 9)
say("replaced", right=is_right(ioshape.load_group(arguments[0]), rank, 2))
"""
    )
    for lines in run_ranks(tmp_path, program, folder):
        assert "FileExistsError" in lines[0]["kinds"], lines[0]
        assert [line["right"] for line in lines[1:]] == [True, True]
    assert checkpoints_in(folder) == [9]


def test_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = (
        BEGIN
        + """
for step in range(1, 13):
    ioshape.save_group(object_of(rank, step), arguments[0], step, keep_last=2, keep_every=5)
"""
    )
    run_ranks(tmp_path, program, folder)
    assert checkpoints_in(folder) == [5, 10, 11, 12]


@pytest.mark.slow
def test_readers_never_lose_what_they_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saving = (
        BEGIN
        + """
for step in range(1, 61):
    ioshape.save_group(object_of(rank, step, 300_000), arguments[0], step, keep_last=1)
    if step == 1:
        say("first")
"""
    )
    reading = (
        BEGIN
        + """
from pathlib import Path
seen = set()
while not Path(arguments[1]).exists():
    found = ioshape.load_group(arguments[0], rank=len(seen) % 2)
    assert is_right(found, found["rank"], found["step"], 300_000), found["step"]
    seen.add(found["step"])
    time.sleep(0.002)
say("read", count=len(seen))
"""
    )
    (tmp_path / "readers").mkdir()
    with started_ranks(tmp_path, saving, folder) as job:
        job.await_all("first")
        with started_ranks(tmp_path / "readers", reading, folder, tmp_path / "end", ranks=1) as one:
            job.end()
            (tmp_path / "end").touch()
            assert one.end()[0][0]["count"] > 3
    # Step 59 may have stayed because the reader was reading it. The reader has ended: only step 60
    # is kept.
    ioshape.prune(folder, keep_last=1)
    assert checkpoints_in(folder) == [60]


# ---- Restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["each", "node", "file"])
@pytest.mark.slow
def test_what_all_ranks_of_a_node_want_is_read_once(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "run"
    n_bytes = 24 << 20
    if way == "file":
        saved = f"rank or ioshape.save(object_of(1, 1, {n_bytes}), arguments[0] + '.pt')"
        loading = "ioshape.load(arguments[0] + '.pt')"
    else:
        saved = f"ioshape.save_group(object_of(rank, 1, {n_bytes}), arguments[0], 1, mode={way!r})"
        loading = "ioshape.load_group(arguments[0], rank=1)"
    run_ranks(tmp_path, BEGIN + saved, folder, ranks=2)
    for file in (*folder.glob("step-0000000001/*"), *tmp_path.glob("*.pt")):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    said = run_ranks(
        tmp_path,
        BEGIN
        + f"""
def read_bytes():
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])

before = read_bytes()
found = {loading}
say("loaded", right=is_right(found, 1, 1, {n_bytes}), read=read_bytes() - before)
""",
        folder,
        ranks=4,
    )
    assert [lines[0]["right"] for lines in said] == [True] * 4
    read = sorted(lines[0]["read"] for lines in said)
    if not sum(read):
        pytest.skip("the folder for temporary files is on no disk")
    assert n_bytes <= sum(read) < 1.05 * n_bytes, read


@pytest.mark.slow
def test_only_the_range_of_a_rank_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    n_bytes = 16 << 20
    program = f"ioshape.save_group(object_of(rank, 1, {n_bytes}), arguments[0], 1, mode='node')"
    run_ranks(tmp_path, BEGIN + program, folder, ranks=4)
    bundle = folder / "step-0000000001" / "node-00000.zip"
    before = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        at = archive.getinfo("rank-00002.pt").header_offset
    middle = at + n_bytes // 2
    bundle.write_bytes(before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :])
    program = (
        BEGIN
        + EXPLAIN
        + """
explain(ioshape.load_group, arguments[0])
"""
    )
    said = run_ranks(tmp_path, program, folder, ranks=4)
    for rank, lines in enumerate(said):
        if rank == 2:
            assert "DamagedError" in lines[0]["kinds"], lines[0]
        else:
            assert lines[0]["kinds"] == [], lines[0]


# ---- Settings ------------------------------------------------------------------------------------


def test_settings_and_arguments_reach_the_group(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
def layout(step, **options):
    return ioshape.save_group(object_of(rank, step), arguments[0], step, **options).mode

ioshape.configure(mode="node", deadline_ms=20_000)
first = layout(1)
second = layout(2, mode="each")
handle = ioshape.save_group_async(object_of(rank, 3), arguments[0], 3, mode="rank0")
third = layout(4, mode="node")
say("done", layouts=[first, second, handle.result().mode, third],
    right=is_right(ioshape.load_group(arguments[0]), rank, 4))
"""
    )
    for lines in run_ranks(tmp_path, program, tmp_path / "run"):
        assert lines[0]["layouts"] == ["node", "each", "rank0", "node"]
        assert lines[0]["right"]


@pytest.mark.parametrize("store", ["host", "files"])
@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_waited_for(tmp_path: Path, store: str) -> None:
    program = (
        BEGIN
        + EXPLAIN
        + """
if rank == 1:
    time.sleep(4)
else:
    explain(ioshape.save_group, {}, arguments[0], 1)
"""
    )
    said = run_ranks(
        *(tmp_path, program, tmp_path / "run"),
        ranks=3,
        IOSHAPE_DEADLINE_MS="1500",
        IOSHAPE_TEST_STORE=store,
    )
    for rank in (0, 2):
        raised = said[rank][0]
        assert "StorageError" in raised["kinds"], raised
        assert "TimeoutError" in raised["kinds"], raised


def test_arguments_that_cannot_be_are_refused_before_anybody_waits(tmp_path: Path) -> None:
    program = (
        BEGIN
        + EXPLAIN
        + """
for options in ({"step": -1}, {"step": "1"}, {"step": True}, {"step": 1, "mode": "all"},
                {"step": 1, "keep_last": -1}):
    explain(ioshape.save_group, {}, arguments[0], **options)
"""
    )
    said = run_ranks(tmp_path, program, tmp_path / "run", ranks=1)
    kinds = [line["kinds"][0] for line in said[0]]
    assert kinds == ["ValueError", "TypeError", "TypeError", "ValueError", "ValueError"]
    assert not (tmp_path / "run").exists()


def test_a_child_that_was_forked_has_no_part_in_it(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
handle = ioshape.save_group_async(object_of(rank, 1), arguments[0], 1)
child = os.fork()
if not child:
    try:
        handle.wait()
    except PermissionError:
        os._exit(7)  # without our exit handlers, too
    os._exit(1)
say("child", status=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
handle.wait()
ioshape.save_group(object_of(rank, 2), arguments[0], 2)
"""
    )
    said = run_ranks(tmp_path, program, tmp_path / "run")
    assert [lines[0]["status"] for lines in said] == [7, 7]
    assert checkpoints_in(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize(
    ("timeout_ms", "code"), [(50, -errno.ETIMEDOUT), (600_000, -errno.ECONNRESET)]
)
def test_the_clock_tells_a_timeout_of_torch_from_other_failures(timeout_ms: int, code: int) -> None:
    """Check that the elapsed time tells a timeout from other failures.

    Torch raises one class for all failures, and its messages may change.
    """

    def transfer(_tensors: list[Any], _other: int, _tag: int) -> Any:
        time.sleep(0.1)
        raise RuntimeError("Connection closed by peer")

    made = comm.Comm(None, None)
    memory = ffi.new("char[]", 64)
    assert made.transfer(transfer, memory, 64, other=1, tag=0, timeout_ms=timeout_ms) == code
    assert str(made.cause()) == "torch.distributed, rank 1: Connection closed by peer"
