# SPDX-License-Identifier: Apache-2.0
"""Test real parallel filesystems with two clients: each sees what the other one saves.

test_realfs_harm.py has the tests that kill servers.
"""

import errno
import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ioshape
import nodes
import pytest
import torch
from checkpoints import checkpoint, left_clean, names_in, number_loaded, wait_until
from clusters import Mounted
from held import held
from ioshape._core import config
from nodes import run_ranks
from processes import started_program

MIB = 1 << 20

pytestmark = pytest.mark.realfs


@dataclass(frozen=True)
class Expected:
    """Differences between the kinds of filesystems."""

    #: files are written with direct I/O by default
    direct: bool
    #: layouts can be requested
    layouts: bool = False
    #: flock() through one mount is seen through the other one
    locks: bool = True
    #: errors that ioshape.load() may raise while the other client replaces the file
    reading: tuple[int, ...] = ()
    #: two clients may give two files one name at once; GlusterFS 10.3 may then block both for half
    #: an hour (https://github.com/gluster/glusterfs/issues/3089)
    same_name: bool = True


EXPECTED = {
    "cephfs": Expected(direct=False, layouts=True),
    "glusterfs": Expected(direct=False, same_name=False),
    "moosefs": Expected(direct=False),
    "ceph": Expected(direct=True, layouts=True),
    "nfs3": Expected(direct=True, locks=False, reading=(errno.ESTALE,)),
    "nfs4.1": Expected(direct=True, reading=(errno.ESTALE,)),
    "nfs4.2": Expected(direct=True, reading=(errno.ESTALE,)),
}


@dataclass(frozen=True)
class Folders:
    """A new folder, as each client sees it."""

    here: Path
    there: Path


@pytest.fixture
def folders(cluster: Mounted, request: pytest.FixtureRequest) -> Folders:
    name = f"{request.node.originalname}-{time.time_ns()}"
    (cluster.path / name).mkdir()
    wait_until((cluster.other / name).is_dir, "the other client sees the folder")
    return Folders(cluster.path / name, cluster.other / name)


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    # With two writing clients ceph-fuse 16.2 may delay a write for more than a minute.
    monkeypatch.setattr(nodes, "TIMEOUT_S", 600.0)
    with left_clean():
        # A new context is needed, because the kernel reuses device numbers of former mounts.
        ioshape.configure(job="realfs")
        yield
        monkeypatch.undo()


def state(seed: int) -> dict[str, torch.Tensor]:
    """Return a state of several blocks, whose length is no multiple of a page."""
    generator = torch.Generator().manual_seed(seed)
    return {"weights": torch.rand((33 * MIB + 100) // 4, generator=generator)}


def assert_is(loaded: dict[str, torch.Tensor], seed: int) -> None:
    assert torch.equal(loaded["weights"], state(seed)["weights"])


@pytest.mark.parametrize("direct", ["prefer", "require", "off"])
def test_another_client_loads_what_was_saved(
    cluster: Mounted, direct: Literal["prefer", "require", "off"]
) -> None:
    ioshape.configure(direct=direct, examine="off")
    ioshape.save(state(1), cluster.path / f"{direct}.pt")
    report = ioshape.save(state(2), cluster.path / f"{direct}.pt")  # replaces the first one
    expected = {"prefer": EXPECTED[cluster.kind].direct, "require": True, "off": False}
    assert report.direct == expected[direct]
    assert_is(ioshape.load(cluster.other / f"{direct}.pt"), 2)
    assert_is(torch.load(cluster.other / f"{direct}.pt"), 2)
    assert not list(cluster.other.glob(".*ioshape-tmp*"))


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_each_engine_saves_what_another_client_loads(
    cluster: Mounted, engine: Literal["uring", "threads"]
) -> None:
    ioshape.configure(engine=engine, examine="off")
    report = ioshape.save(state(3), cluster.path / f"{engine}.pt")
    assert report.engine == engine
    assert_is(ioshape.load(cluster.other / f"{engine}.pt"), 3)


def test_defaults_take_no_downgrade_of_direct_io(cluster: Mounted) -> None:
    report = ioshape.save(state(1), cluster.path / "defaults.pt")
    codes = [step.code for step in report.downgrades]
    assert "direct" not in codes
    assert report.direct == EXPECTED[cluster.kind].direct
    if cluster.kind.startswith("nfs"):
        assert ("preallocate" in codes) is (cluster.kind != "nfs4.2")
        assert report.filesystem.startswith("nfs")


def test_background_saves_streams_and_groups(cluster: Mounted) -> None:
    ioshape.save_async(state(3), cluster.path / "background.pt").wait()
    assert_is(ioshape.load(cluster.other / "background.pt"), 3)
    whole = io.BytesIO()
    torch.save(state(4), whole)
    with ioshape.open(cluster.path / "stream.pt", "wb") as file:
        file.write(whole.getvalue())
    assert_is(torch.load(cluster.other / "stream.pt"), 4)
    ioshape.save_group(state(5), cluster.path / "run", step=5)
    ioshape.save_group(state(6), cluster.path / "run", step=5)  # replaces the first one
    assert_is(ioshape.load_group(cluster.other / "run"), 6)


def test_a_pool_is_named_after_the_cluster(cluster: Mounted) -> None:
    """Check that both clients use one pool, whose name contains the cluster."""
    names = {ioshape.probe(path).pool for path in (cluster.path, cluster.other)}
    (name,) = names
    if cluster.kind in {"cephfs", "ceph"}:
        configuration = (cluster.path.parent / "ceph.conf").read_text(encoding="ascii")
        (fsid,) = [
            line.split(" = ")[1] for line in configuration.splitlines() if line.startswith("fsid")
        ]
        assert name == f"ceph:{fsid}"
    else:
        begins = {
            "glusterfs": "fuse.glusterfs:",
            "moosefs": "fuse:mfs_",
            "nfs3": f"nfs:10.77.0.1:{cluster.path.parent}/target-1",
        }
        assert name.startswith(begins.get(cluster.kind, "nfs:10.77.0.1:/export"))


def test_doctor_finds_no_lack_of_inodes(cluster: Mounted) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ioshape", "doctor", cluster.path, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    told = json.loads(done.stdout)
    assert "inodes" not in json.dumps(told["findings"])


def test_bench_compares_saves_without_slots_and_with_them(cluster: Mounted) -> None:
    """Check the printed comparison, and how each way saved."""
    before = sorted(path.name for path in cluster.path.iterdir())
    assert re.search(
        r"^ioshape.save_async compared with save_async, no slots: .* reads \S+ times\.$",
        bench(cluster.path),
        re.MULTILINE,
    )
    found = json.loads(bench(cluster.path, "--json"))
    reports = {way: one["report"] for way, one in found["ways"].items()}
    assert {way: one["coordinator"] for way, one in reports.items()} == {
        "open": "open",
        "async": "local",
    }
    # The other client sees no leftovers on the filesystem.
    assert sorted(path.name for path in cluster.other.iterdir()) == before


def bench(path: Path, *options: str) -> str:
    small = ["--ranks", "4", "--ways", "open,async", "--size", "20M", "--rounds", "1"]
    return subprocess.run(
        [sys.executable, "-m", "ioshape", "bench", path, *small, *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    ).stdout


# ---- Replacing -----------------------------------------------------------------------------------

READER = """
    import json
    import select
    import sys

    import ioshape

    seen, failed = [], []
    while not select.select([sys.stdin], [], [], 0)[0]:
        try:
            found = ioshape.load(sys.argv[1])
            assert bool((found["data"] == found["number"] + 1).all()), "half a file"
            seen.append(found["number"])
        except (OSError, RuntimeError, AssertionError) as error:
            failed.append([getattr(error, "errno", None), str(error)])
        if len(seen) + len(failed) == 1:
            print("reads", flush=True)
    print(json.dumps({"seen": seen, "failed": failed}))
"""


def test_another_client_never_sees_half_a_file_or_none(
    cluster: Mounted, folders: Folders, tmp_path: Path
) -> None:
    last = 20
    ioshape.save(checkpoint(0, 8 * MIB), folders.here / "model.pt")
    with started_program(tmp_path, READER, folders.there / "model.pt") as reader:
        reader.expect("reads")
        for number in range(1, last + 1):
            ioshape.save(checkpoint(number, 8 * MIB), folders.here / "model.pt")
        reader.tell("end")
        told = json.loads(reader.end().stdout)
    allowed = EXPECTED[cluster.kind].reading
    assert [error for error in told["failed"] if error[0] not in allowed] == []
    assert told["seen"] == sorted(told["seen"]), "it went back to an older one"
    assert len(set(told["seen"])) > 1
    wait_until(lambda: number_loaded(folders.there / "model.pt") == last, "the last one")


def test_a_reader_keeps_the_file_that_it_opened(folders: Folders) -> None:
    ioshape.save(state(1), folders.here / "model.pt")
    with ioshape.open(folders.here / "model.pt") as file:
        ioshape.save(state(2), folders.here / "model.pt")
        assert_is(torch.load(file), 1)
    assert_is(ioshape.load(folders.here / "model.pt"), 2)
    # An NFS client renames the replaced file to .nfs*, and removes it when it is closed.
    wait_until(lambda: names_in(folders.here) == ["model.pt"], "nothing else is left")


TWO_WRITERS = """
import fcntl
import ioshape
from checkpoints import checkpoint
from group_program import arguments, rank, say

ioshape.configure(examine="off")
how = fcntl.LOCK_SH if arguments[2] == "at once" else fcntl.LOCK_EX
with open(arguments[3], "w") as turn:
    for number in range(10):
        fcntl.flock(turn, how)
        ioshape.save(checkpoint(100 * rank + number, 8 << 20), arguments[rank])
        fcntl.flock(turn, fcntl.LOCK_UN)
say("done")
"""


def test_two_clients_write_one_path(cluster: Mounted, folders: Folders, tmp_path: Path) -> None:
    paths = (folders.here / "model.pt", folders.there / "model.pt")
    how = "at once" if EXPECTED[cluster.kind].same_name else "in turn"
    run_ranks(tmp_path, TWO_WRITERS, *paths, how, tmp_path / "turn", ranks=2, nodes=2)
    wait_until(lambda: number_loaded(paths[0]) == number_loaded(paths[1]), "both see one file")
    assert number_loaded(paths[0]) in (9, 109)
    # An NFS client renames a removed file that it believes to be open to .nfs*. Here the file is
    # the other client's.
    is_ours = re.compile(r"(?!\.nfs)").match
    for folder in (folders.here, folders.there):
        wait_until(
            lambda folder=folder: list(filter(is_ours, names_in(folder))) == ["model.pt"],
            "nothing else is left",
        )


ONE_WINNER = """
import ioshape
from checkpoints import checkpoint
from group_program import arguments, rank, say

ioshape.configure(examine="off")
for number in range(20):
    try:
        ioshape.save(checkpoint(rank), f"{arguments[rank]}/{number}.pt", replace=False)
        say("won", number=number)
    except ioshape.StorageError as error:
        assert isinstance(error, FileExistsError), error
"""


def test_of_two_clients_that_must_not_replace_one_wins(
    cluster: Mounted, folders: Folders, tmp_path: Path
) -> None:
    if not EXPECTED[cluster.kind].same_name:
        pytest.skip("two clients must not give two files one name at once")
    won = run_ranks(tmp_path, ONE_WINNER, folders.here, folders.there, ranks=2, nodes=2)
    assert sorted(line["number"] for lines in won for line in lines) == list(range(20))
    for rank, lines in enumerate(won):
        for line in lines:
            assert number_loaded(folders.here / f"{line['number']}.pt") == rank
    assert len(names_in(folders.here)) == 20


# ---- Running and dead processes -----------------------------------------------------------------


def same_client(folders: Folders) -> bool:
    """Return whether the kernel has one superblock for both mounts, as for NFS."""
    return folders.here.stat().st_dev == folders.there.stat().st_dev


def tidy(folder: Path) -> None:
    """Save as a new process would.

    Its first save into a folder removes leftovers of dead processes.
    """
    config.reset()
    ioshape.configure(job="realfs")
    ioshape.save(checkpoint(9), folder / "other.pt")
    (folder / "other.pt").unlink()


def leftovers(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if "ioshape-tmp" in name]


def test_a_killed_save_leaves_the_old_file(folders: Folders, tmp_path: Path) -> None:
    here, there = folders.here / "model.pt", folders.there / "model.pt"
    ioshape.save(checkpoint(1), here)
    with held(tmp_path, "save", here, 2) as save:
        save.kill()
    assert number_loaded(here) == number_loaded(there) == 1
    wait_until(lambda: len(leftovers(folders.there)) == 1, "the other client sees what is left")
    if not same_client(folders):
        tidy(folders.there)  # its writer could be alive on this client
        assert len(leftovers(folders.here)) == 1
    tidy(folders.here)
    for folder in (folders.here, folders.there):
        wait_until(lambda folder=folder: names_in(folder) == ["model.pt"], "nothing else is left")
    ioshape.save(checkpoint(3), there)
    wait_until(lambda: number_loaded(here) == 3, "a later save")


def test_a_living_save_keeps_its_file(folders: Folders, tmp_path: Path) -> None:
    here = folders.here / "model.pt"
    with held(tmp_path, "save", here, 2) as save:
        tidy(folders.here)
        tidy(folders.there)
        assert len(leftovers(folders.here)) == 1
        save.go_on()
        assert save.end()["errno"] == 0
    assert number_loaded(here) == 2
    assert names_in(folders.here) == ["model.pt"]
    wait_until(lambda: names_in(folders.there) == ["model.pt"], "the other client")


def test_a_client_sees_locks_of_the_other(cluster: Mounted, folders: Folders) -> None:
    (folders.here / "file").touch()
    wait_until((folders.there / "file").exists, "the other client sees the file")
    with (folders.here / "file").open("w") as one, (folders.there / "file").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            seen = True
        else:
            seen = False
    assert seen == EXPECTED[cluster.kind].locks


def test_what_one_client_reads_the_other_does_not_prune(
    cluster: Mounted, folders: Folders, tmp_path: Path
) -> None:
    locks = EXPECTED[cluster.kind].locks
    for step in (1, 2):
        ioshape.save_group(checkpoint(step, 32 * MIB), folders.here, step)
    with held(tmp_path, "load_group", folders.there, 1, phase="read") as load:
        assert ioshape.prune(folders.here, keep_last=1) == ([] if locks else [1])
        load.go_on()
        assert load.end()["errno"] in ((0,) if locks else EXPECTED[cluster.kind].reading)
    if locks:
        assert ioshape.prune(folders.here, keep_last=1) == [1]
    assert names_in(folders.here) == ["step-0000000002"]


# ---- Groups --------------------------------------------------------------------------------------

# All ranks use one path. On the second node the other mount is bound to the path of the first.
GROUP = """
import ctypes
import subprocess
from group_program import *

here, there, mode = arguments
if rank >= 2:
    assert not ctypes.CDLL(None).unshare(0x20000)  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", there, here], check=True)
if mode == "rank0":
    set_up_distributed()
for step in (1, 2, 3):
    report = ioshape.save_group(object_of(rank, step, 2_000_000), here, step, mode=mode,
                                keep_last=2)
say("saved", layout=report.mode, device=os.stat(here).st_dev)
found = ioshape.load_group(here, rank=ranks - 1 - rank)
say("loaded", right=is_right(found, ranks - 1 - rank, 3, 2_000_000))
"""


@pytest.mark.parametrize("mode", ["each", "node", "rank0"])
def test_ranks_on_both_clients_save_one_checkpoint(
    folders: Folders, tmp_path: Path, mode: str
) -> None:
    said = run_ranks(
        *(tmp_path, GROUP, folders.here, folders.there, mode),
        ranks=4,
        nodes=2,
        IOSHAPE_TEST_STORE="files",
    )
    devices = [folder.stat().st_dev for folder in (folders.here, folders.there)]
    for lines, device in zip(said, [devices[0]] * 2 + [devices[1]] * 2, strict=True):
        assert (lines[0]["layout"], lines[0]["device"]) == (mode, device)
        assert lines[1]["right"]
    for folder in (folders.here, folders.there):
        assert [one.step for one in ioshape.checkpoints(folder)] == [2, 3]
        assert not [name for name in names_in(folder) if name.startswith(".step")]


def test_a_killed_group_leaves_an_attempt_to_its_own_client(
    folders: Folders, tmp_path: Path
) -> None:
    ioshape.save_group(checkpoint(1), folders.here, 1)
    with held(tmp_path, "save_group", folders.here, 2) as save:
        save.kill()

    def attempts(folder: Path) -> list[str]:
        return [name for name in names_in(folder) if name.startswith(".step")]

    wait_until(lambda: len(attempts(folders.there)) == 1, "the other client sees the attempt")
    latest = ioshape.latest(folders.there)
    assert latest is not None
    assert latest.step == 1
    if not same_client(folders):
        ioshape.save_group(checkpoint(3), folders.there, 3)
        assert len(attempts(folders.here)) == 1
    ioshape.save_group(checkpoint(4), folders.here, 4)
    assert attempts(folders.here) == []
    assert ioshape.load_group(folders.there, step=4)["number"] == 4


# ---- Layouts -------------------------------------------------------------------------------------


def test_a_layout_that_is_asked_for_changes_nothing(cluster: Mounted, folders: Folders) -> None:
    ioshape.configure(layout="stripe_count=4,stripe_size=1M")
    report = ioshape.save(state(1), folders.here / "model.pt")
    assert_is(ioshape.load(folders.there / "model.pt"), 1)
    assert [step for step in report.downgrades if step.code == "layout"] == []
    assert report.stripes.startswith("1 x ") is EXPECTED[cluster.kind].layouts, report.stripes


def test_a_directory_passes_its_layout_on(cluster: Mounted, folders: Folders) -> None:
    if not EXPECTED[cluster.kind].layouts:
        assert ioshape.probe(folders.here).stripes == ""
        return
    os.setxattr(folders.here, "ceph.dir.layout.stripe_count", b"2")
    report = ioshape.save(state(1), folders.here / "model.pt")
    assert report.stripes.startswith("2 x 4M"), report.stripes
    told = os.getxattr(folders.there / "model.pt", "ceph.file.layout").decode()
    assert told.startswith("stripe_unit=4194304 stripe_count=2 ")
    assert ioshape.probe(folders.there).stripe_count == 2
