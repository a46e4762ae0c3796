# SPDX-License-Identifier: Apache-2.0
"""Several jobs, or several restarts of one job, that save groups into one directory."""

import itertools
import signal
import subprocess
from pathlib import Path

import ioshape
import pytest
from coordinators import await_true
from group_program import is_right
from nodes import run_ranks, started_ranks
from ports import free_port

BEGIN = "from group_program import *\n"
N_BYTES = 8_000_000

# SLEEPER is a rank that stops itself in the middle of step 2, while it writes its shard or sends it
# to its writer.
SAVING = (
    BEGIN
    + """
import signal

from ioshape._group import group as _group

directory, salt, first, last = arguments[0], *map(int, arguments[1:])

slept = False

def fall_asleep(now):
    global slept
    # Once; not when all of its part is there already: that checkpoint may be completed.
    if now.phase == "write" and 0 < now.done_bytes < now.total_bytes // 2 and not slept:
        slept = True
        os.kill(os.getpid(), signal.SIGSTOP)

for step in range(first, last + 1):
    asleep = os.environ.get("SLEEPER") == str(rank) and step == 2
    progress = fall_asleep if asleep else None
    state = object_of(rank + salt, step, 8_000_000)
    try:
        ioshape.save_group(state, directory, step, mode="node", progress=progress)
    except Exception as error:
        say("failed", step=step, text=str(error))
        break
    say("saved", step=step)
# As the end of a program does: rank 0 waits until the others have heard of the last save.
_group.close()
os._exit(0)
"""
)


def whose(checkpoint: ioshape.types.Checkpoint) -> int:
    """Return the salt of the job that wrote a checkpoint.

    Check that all shards are right and of that job.
    """
    objects = [checkpoint.load(rank) for rank in range(checkpoint.ranks)]
    salt = int(objects[0]["rank"])
    for rank, found in enumerate(objects):
        assert is_right(found, rank + salt, checkpoint.step, N_BYTES), checkpoint.path
    checkpoint.verify()
    return salt


@pytest.mark.slow
def test_two_jobs_in_one_directory(tmp_path: Path) -> None:
    """Check that each checkpoint has the shards of one job.

    Both jobs save the same steps at the same time.
    """
    run = tmp_path / "run"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    last = 10
    with (
        started_ranks(folders[0], SAVING, run, 100, 1, last) as first,
        started_ranks(folders[1], SAVING, run, 200, 1, last) as second,
    ):
        for lines in (*first.end(), *second.end()):
            assert [line["event"] for line in lines] == ["saved"] * last, lines[-1]
    checkpoints = ioshape.checkpoints(run)
    assert [checkpoint.step for checkpoint in checkpoints] == list(range(1, last + 1))
    assert {whose(checkpoint) for checkpoint in checkpoints} <= {100, 200}
    assert not list(run.glob(".*step-*"))


def is_stopped(process: int) -> bool:
    """Return whether SIGSTOP has stopped the process."""
    return "\nState:\tT" in Path(f"/proc/{process}/status").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "victim", [0, *(pytest.param(rank, marks=pytest.mark.long) for rank in (2, 3))]
)
@pytest.mark.slow
def test_a_process_of_an_earlier_life_wakes_up_too_late(tmp_path: Path, victim: int) -> None:
    """Check that a stopped rank of a killed job cannot harm the checkpoints of the job's restart.

    The victim is rank 0, the writer of a node, or a rank that sends its shard. It wakes up after
    the other ranks were killed and the job was restarted under its old name.
    """
    run = tmp_path / "run"
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    more = {
        "ranks": 4,
        "nodes": 2,
        "IOSHAPE_DEADLINE_MS": "3000",
        "IOSHAPE_TEST_STORE": "files",
        "IOSHAPE_JOB": "same",
        "MASTER_PORT": str(free_port()),
    }
    sleeper = {**more, "SLEEPER": str(victim)}
    with started_ranks(folders[0], SAVING, run, 100, 1, 1000, **sleeper) as old:  # type: ignore[arg-type]
        old.await_all("saved")
        await_true(lambda: is_stopped(old.members[victim].process.pid), "the sleeper")
        (attempt,) = run.glob(".step-*")
        others = [member for rank, member in enumerate(old.members) if rank != victim]
        for member in others:
            member.process.kill()
        for member in others:
            member.process.wait(30.0)
        with started_ranks(folders[1], SAVING, run, 200, 2000, 2003, **more) as new:  # type: ignore[arg-type]
            for lines in new.end():
                assert [line["event"] for line in lines] == ["saved"] * 4, lines[-1]
        # The attempt of a stopped rank 0 is kept because rank 0 holds its lock. The attempt of a
        # killed rank 0 is removed.
        assert attempt.exists() == (victim == 0)
        before = {
            checkpoint.step: (checkpoint.saved, whose(checkpoint))
            for checkpoint in ioshape.checkpoints(run)
        }
        old.members[victim].process.signal(signal.SIGCONT)
        said = old.end(*(rank for rank in range(4) if rank != victim))
        if victim:
            assert said[victim][-1]["event"] == "failed"
    after = {
        checkpoint.step: (checkpoint.saved, whose(checkpoint))
        for checkpoint in ioshape.checkpoints(run)
    }
    # Rank 0 may already have all messages of the other ranks. Then it completes its checkpoint.
    woke = after.pop(2, None)
    assert woke is None or (victim == 0 and woke[1] == 100)
    assert after == before
    assert {step: salt for step, (_, salt) in after.items()} == {
        1: 100,
        **dict.fromkeys(range(2000, 2004), 200),
    }
    with started_ranks(folders[2], SAVING, run, 300, 3000, 3000, **more) as last:  # type: ignore[arg-type]
        last.end()
    assert [path.name for path in run.glob(".*step-*")] == []


def test_after_a_death_every_save_fails(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
for step in range(1, 5):
    if rank == 2 and step == 2:
        os.kill(os.getpid(), 9)
    try:
        ioshape.save_group(object_of(rank, step), arguments[0], step)
    except Exception as error:
        say("failed", step=step, failed=error.rank)
    else:
        say("saved", step=step)
"""
    )
    with started_ranks(
        tmp_path, program, tmp_path / "run", ranks=4, IOSHAPE_TEST_STORE="host"
    ) as job:
        said = job.end(2)
    for rank, lines in enumerate(said):
        if rank != 2:
            assert [line["event"] for line in lines] == ["saved", *["failed"] * 3]
            # Rank 0 reports that rank 2 failed. Once rank 0 has exited, the other ranks do not wait
            # for it.
            assert lines[1]["failed"] == 2, lines[1]
    assert [checkpoint.step for checkpoint in ioshape.checkpoints(tmp_path / "run")] == [1]


def test_rank_0_dies_before_it_can_say_that_all_is_well(tmp_path: Path) -> None:
    """Check that the other ranks recognise the checkpoint that rank 0 committed before it died.

    Between the commit and the verdict rank 0 logs that a process reads the replaced checkpoint. It
    is killed there.
    """
    program = (
        BEGIN
        + """
import logging
from ioshape._group.checkpoints import Handle

class Dies(logging.Handler):
    def emit(self, record):
        if "was replaced while a process reads it" in record.getMessage():
            os.kill(os.getpid(), 9)

logging.getLogger("ioshape").setLevel(logging.INFO)
if rank == 0:
    logging.getLogger("ioshape").addHandler(Dies())
ioshape.save_group(object_of(rank, 1, 8_000_000), arguments[0], 1)
with Handle(arguments[0], 1, "load"):
    ioshape.save_group(object_of(rank + 100, 1, 8_000_000), arguments[0], 1)
say("saved", step=1)
os._exit(0)
"""
    )
    run = tmp_path / "run"
    with started_ranks(tmp_path, program, run, ranks=3, IOSHAPE_TEST_STORE="host") as job:
        said = job.end(0)
    assert job.members[0].process.status == -signal.SIGKILL
    assert [[line["event"] for line in lines] for lines in said] == [[], ["saved"], ["saved"]]
    (checkpoint,) = ioshape.checkpoints(run)
    assert whose(checkpoint) == 100


# ---- Containers ----------------------------------------------------------------------------------

BEGIN_IN_CONTAINER = (
    BEGIN
    + """
import ctypes
CLONE_NEWNS, MS_PRIVATE, MS_REC = 0x20000, 1 << 18, 1 << 14
libc = ctypes.CDLL(None)
assert not libc.unshare(CLONE_NEWNS)
assert not libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_PRIVATE | MS_REC), None)
assert not libc.mount(b"none", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=4k")
"""
)


@pytest.mark.slow
def test_containers_with_a_tiny_dev_shm_each(tmp_path: Path) -> None:
    """Check that such containers count as separate nodes, use a store in the directory, and need no
    shared memory.
    """
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=4k", "none", "/dev/shm"]
    probe = subprocess.run(mount, capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mounts of one's own here: {probe.stderr.decode().strip()}")
    said = run_ranks(
        tmp_path,
        BEGIN_IN_CONTAINER
        + """
state = object_of(rank, 1, 40_000_000)
handle = ioshape.save_group_async(state, arguments[0], 1, mode="node")
handle.wait()
right = is_right(ioshape.load_group(arguments[0]), rank, 1, 40_000_000)
say("loaded", right=right)
""",
        tmp_path / "run",
        ranks=3,
    )
    assert [lines[-1]["right"] for lines in said] == [True] * 3
    names = itertools.chain.from_iterable(path.iterdir() for path in (tmp_path / "run").iterdir())
    files = [f"node-{node:05}.zip" for node in range(3)]
    assert sorted(path.name for path in names) == ["manifest.json", *files]
