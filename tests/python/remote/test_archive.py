# SPDX-License-Identifier: Apache-2.0
"""`ioshape archive`: checkpoints in the HSM archive of a Lustre, simulated by stripefs."""

import errno
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import ioshape
import pytest
from command import call, fail, on_terminal, succeed
from ioshape._remote import hsm
from ioshape.types import Progress
from striped import INSTANT, Mount, striped
from tiers import Saver

pytestmark = pytest.mark.usefixtures("_mounts_of_stripefs")

MIB = 1 << 20
#: flags of Lustre's headers
DIRTY, ARCHIVED = 2, 8


@pytest.fixture
def mount() -> Iterator[Mount]:
    with striped("ssd", **INSTANT) as mounted:
        yield mounted


def asked(path: Path, number: int, layout: str) -> tuple[int, ...]:
    """Return the answer of a Lustre ioctl that is defined by _IOR('f', number, ...)."""
    size = struct.calcsize(layout)
    with path.open("rb") as file:
        told = fcntl.ioctl(file, 2 << 30 | size << 16 | ord("f") << 8 | number, bytes(size))
    return struct.unpack(layout, told)


def flags(path: Path) -> int:
    return asked(path, 211, "=IIIIQQ")[0]


def is_wanted(path: Path) -> bool:
    return asked(path, 220, "=IIQQ")[1] == 10


def generation(folder: Path, step: int = 1) -> Path:
    ioshape.save_group({"weight": "x" * 100_000}, folder, step=step)
    return folder / f"step-{step:010}"


def file_in(mount: Mount, n_bytes: int = MIB) -> Path:
    path = mount.path / "model.pt"
    path.write_bytes(os.urandom(n_bytes))
    return path


# ---- Archived files ------------------------------------------------------------------------------


def test_a_generation_is_archived_and_its_manifest_last(mount: Mount) -> None:
    path = generation(mount.path / "runs")
    *others, manifest = sorted(path.iterdir(), key=lambda one: one.name == "manifest.json")
    assert others
    seen = []

    def look(_: Progress) -> None:
        done = all(flags(one) & ARCHIVED for one in others)
        seen.append((done, is_wanted(manifest) or bool(flags(manifest))))
        if not done:
            mount.order("archive well")

    mount.order("archive stuck")
    done = hsm.archive(str(path), progress=look)
    assert done.files == len(others) + 1
    assert done.archived_bytes == done.n_bytes == sum(one.stat().st_size for one in path.iterdir())
    assert all(flags(one) & (ARCHIVED | DIRTY) == ARCHIVED for one in (*others, manifest))
    assert (False, False) in seen
    assert (False, True) not in seen


def test_what_is_archived_is_not_asked_for_again(mount: Mount) -> None:
    path = file_in(mount)
    assert hsm.archive(str(path)).archived_bytes == MIB
    mount.order("archive refused")  # any further request would fail
    mount.reset()
    assert hsm.archive(str(path)).archived_bytes == 0
    assert mount.statistics()["metadata"]["ioctl"] == 1
    mount.order("archive well")
    with path.open("ab") as file:
        file.write(b"more")
    assert flags(path) & DIRTY
    assert hsm.archive(str(path)).archived_bytes == MIB + 4
    assert flags(path) == flags(path) & ~DIRTY


def test_progress_is_that_of_the_bytes() -> None:
    with striped("ssd", **INSTANT, bandwidth="8M") as slow:
        path = file_in(slow, 4 * MIB)
        seen: list[Progress] = []
        hsm.archive(str(path), progress=seen.append)
    assert {(one.phase, one.total_bytes) for one in seen} == {("archive", 4 * MIB)}
    assert any(0 < one.done_bytes < 4 * MIB for one in seen)
    assert seen[-1].done_bytes == 4 * MIB
    done = [one.done_bytes for one in seen]
    assert done == sorted(done)


def test_what_is_being_written_is_left_out(mount: Mount) -> None:
    path = mount.path / "run"
    for name in ("step-0000000001/data", ".step-0000000002.7f/data", "a.ioshape-tmp-1/data"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_bytes(b"data")
    (path / ".model.pt.ioshape-tmp-0a0b0c0d-0").write_bytes(b"half")
    assert hsm.archive(str(path)).files == 1
    assert flags(path / "step-0000000001/data") & ARCHIVED


# ---- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "number", "why"),
    [
        ("refused", errno.EPERM, "only from root"),
        ("off", errno.EAGAIN, "HSM is not enabled"),
        ("failing", errno.EIO, "Lustre failed"),
        ("stuck", errno.ETIMEDOUT, "nothing was archived for 0.3 s"),
    ],
)
def test_what_goes_wrong_is_said(order: str, number: int, why: str, mount: Mount) -> None:
    path = file_in(mount)
    mount.order(f"archive {order}")
    with pytest.raises(ioshape.StorageError, match=f'cannot archive "{path}": .*{why}') as caught:
        hsm.archive(str(path), timeout_s=0.3)
    assert caught.value.errno == number
    assert caught.value.remedy
    assert not flags(path)
    mount.order("archive well")
    assert hsm.archive(str(path)).n_bytes == MIB


def test_a_file_that_somebody_writes_to_is_not_called_archived(mount: Mount) -> None:
    path = file_in(mount)

    def write(_: Progress) -> None:
        if is_wanted(path):
            with path.open("r+b") as file:
                file.write(b"other")
            mount.order("archive well")

    mount.order("archive stuck")
    with pytest.raises(ioshape.StorageError, match="another process is writing to it") as caught:
        hsm.archive(str(path), progress=write)
    assert caught.value.errno == errno.EBUSY
    assert flags(path) & (ARCHIVED | DIRTY) == ARCHIVED | DIRTY


def test_a_file_that_is_removed_meanwhile_is_said(mount: Mount) -> None:
    path = file_in(mount)

    def remove(_: Progress) -> None:
        path.unlink(missing_ok=True)

    mount.order("archive stuck")
    with pytest.raises(FileNotFoundError, match="it was removed"):
        hsm.archive(str(path), progress=remove)


def test_an_exception_of_the_callback_ends_it(mount: Mount) -> None:
    def stop(_: Progress) -> None:
        raise LookupError("mine")

    mount.order("archive stuck")
    with pytest.raises(LookupError, match="mine"):
        hsm.archive(str(file_in(mount)), progress=stop)


def test_other_filesystems_have_no_archive(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"data")
    assert "is not on a Lustre filesystem" in fail(call("archive", tmp_path / "model.pt"))
    (tmp_path / "empty").mkdir()
    assert "there is no file in it" in fail(call("archive", tmp_path / "empty"))
    assert "No such file" in fail(call("archive", tmp_path / "none"))


# ---- The command ---------------------------------------------------------------------------------


def test_the_command(mount: Mount) -> None:
    path = generation(mount.path / "runs")
    other = file_in(mount)
    assert "is not in the archive" in fail(call("archive", "--check", path))
    assert not any(flags(one) for one in path.iterdir())
    said = succeed(call("archive", path, other)).splitlines()
    assert said[0].startswith(f"{path}: archived, {len(list(path.iterdir()))} files, ")
    assert said[1].startswith(f"{other}: archived, 1 file, 1.00 MiB; 1.00 MiB newly archived in ")
    assert "; nothing newly archived" in succeed(call("archive", "--check", other))
    (one,) = json.loads(succeed(call("archive", "--json", other)))
    assert (one["path"], one["files"], one["bytes"]) == (str(other), 1, MIB)
    assert one["archived_bytes"] == 0
    with other.open("ab") as file:
        file.write(b"more")
    assert "it has changed since" in fail(call("archive", "--check", other))
    code, seen = on_terminal("archive", str(other))
    assert code == 0
    assert "archived, 1 file" in seen


def test_what_was_drained_is_archived_once(tmp_path: Path, mount: Mount) -> None:
    saves = Saver(tmp_path)
    saves.slow = mount.path
    path, folder = saves.save("a.pt"), saves.save_directory("model", weights=b"1234")

    def drain() -> list[tuple[str, str]]:
        done = call("drain", saves.fast, "--to", "hsm", "--json")
        return [(one["result"], one["path"]) for one in json.loads(done.stdout)]

    drained = [("drained", str(path)), ("drained", str(folder))]
    mount.order("archive refused")
    assert drain() == [*drained, ("failed", str(path)), ("failed", str(folder))]
    assert call("drain", saves.fast, "--to", "hsm").stderr.count("only from root") == 2
    mount.order("archive well")
    assert drain() == [("archived", str(path)), ("archived", str(folder))]
    assert flags(path) & flags(folder / "weights") & ARCHIVED
    assert drain() == []
    # Removal at the destination is no failure.
    saves.save("a.pt", b"again")
    path.unlink()
    (folder / "weights").unlink()
    folder.rmdir()
    assert drain() == [("drained", str(path)), ("archived", str(path))]
    saves.tier.close()
