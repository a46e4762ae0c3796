# SPDX-License-Identifier: Apache-2.0
"""`ioshape drain`, and how `ioshape ls` shows a tier."""

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ioshape
import object_store
import pytest
import torch
from command import IOSHAPE, call, fail, on_terminal, succeed
from coordinators import await_true, coordinator, writers
from ioshape._tier.tier import tiers_at
from mounts import small_disk
from object_store import BUCKET, Store
from processes import TIMEOUT_S, environment, run_where_mounted
from records import names_in
from tiers import Saver, saver, undrained

RUN = f"s3://{BUCKET}/run"
MIB = 1 << 20
#: more than any buffer between a drain and its destination
LARGE = 32 << 20


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saver]:
    with saver(tmp_path) as made:
        yield made


#: settings with a coordinator that does not exist
NOBODY = {"IOSHAPE_COORDINATOR": "redis://127.0.0.1:1", "IOSHAPE_UNREACHABLE": "fail"}


def members(address: str, kind: str) -> list[dict[str, Any]]:
    """Return the requests in the pool that hold a slot ("holders") or wait for one ("waiters")."""
    text = succeed(call("slots", "status", "shared", "--coordinator", address, "--json"))
    found: list[dict[str, Any]] = json.loads(text)[0][kind]
    return found


def seen_at(address: str) -> int:
    """Return the bytes that all holders have written, as `ioshape slots status` shows them."""
    return sum(one["passed"] for one in members(address, "holders"))


def drained(*arguments: str | Path | int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(succeed(call("drain", "--json", *arguments)))
    return found


# ---- Single runs ---------------------------------------------------------------------------------


def test_what_waits_is_carried_and_said(saves: Saver) -> None:
    path = saves.save("a.pt")
    folder = saves.save_group(1)
    lines = succeed(call("drain", saves.fast)).splitlines()
    assert re.fullmatch(rf"{path}: drained, 5 B in .*", lines[0])
    assert re.fullmatch(rf"{folder}: drained, [0-9.]+ KiB in .*", lines[1])
    assert len(lines) == 2
    assert path.read_bytes() == b"saved"
    assert names_in(folder) == ["manifest.json", "rank-00000.pt"]
    text = succeed(call("drain", saves.fast))
    assert text == f"No checkpoint on {saves.fast} waits to be drained.\n"
    assert drained(saves.fast) == []


def test_what_is_not_carried_is_said(saves: Saver) -> None:
    newer = saves.save("newer")
    newer.write_bytes(b"direct")
    later = time.time_ns() + 10**9
    os.utime(newer, ns=(later, later))
    saves.save("twice")
    twice = saves.save("twice", b"again")
    gone = saves.save("gone")
    Path(next(one.copy_path for one in saves.copies() if one.path == str(gone))).unlink()
    found = [(one["path"], one["result"], one["bytes"]) for one in drained(saves.fast)]
    assert found == [
        (str(newer), "newer", 0),
        (str(twice), "overtaken", 0),
        (str(twice), "drained", 5),
        (str(gone), "gone", 0),
    ]
    assert newer.read_bytes() == b"direct"
    newer.unlink()
    saves.save("newer")
    newer.write_bytes(b"direct")
    os.utime(newer, ns=(2 * later, 2 * later))
    assert "the destination has a newer checkpoint" in succeed(call("drain", saves.fast))


def test_what_fails_stays_and_the_others_are_carried(saves: Saver) -> None:
    bad, good = saves.save("bad"), saves.save("good")
    (bad / "inner").mkdir(parents=True)
    done = call("drain", saves.fast)
    assert done.returncode == 1
    assert done.stderr.count("a directory is there") == 1
    assert done.stdout.startswith(f"{good}: drained")
    done = call("drain", saves.fast, "--json")
    (one,) = json.loads(done.stdout)
    assert (done.returncode, one["path"], one["result"]) == (1, str(bad), "failed")
    assert "a directory is there" in one["error"]
    (bad / "inner").rmdir()
    bad.rmdir()
    assert [one["result"] for one in drained(saves.fast)] == ["drained"]


def test_what_can_never_be_drained_is_forgotten(saves: Saver) -> None:
    (saves.slow / "run").mkdir()
    path, other = saves.save("run/a.pt"), saves.save("b.pt")
    place = Path(saves.copies()[0].copy_path)
    (saves.slow / "run").rmdir()
    assert call("drain", saves.fast).returncode == 1
    assert succeed(call("drain", saves.fast, "--forget", path)).startswith(
        f"{path}: forgotten, 5 B"
    )
    assert not place.exists()
    assert [copy.path for copy in saves.copies()] == [str(other)]
    # An unknown path is an error. The command still forgets its other paths.
    saves.save("c.pt")
    done = call("drain", saves.fast, "--forget", other, "--forget", saves.slow / "c.pt", "--json")
    assert done.returncode == 1
    assert f'no save for "{other}" waits' in done.stderr
    first, second = json.loads(done.stdout)
    assert (first["path"], first["result"], second["result"]) == (str(other), "failed", "forgotten")
    assert drained(saves.fast) == []
    with undrained(saves.fast):
        saves.save("d.pt")
        assert "is draining the tier" in fail(
            call("drain", saves.fast, "--forget", saves.slow / "d.pt")
        )
    assert "not with" in call("drain", saves.fast, "--forget", path, "--watch").stderr


def test_folders_without_saves(tmp_path: Path) -> None:
    assert "waits to be drained" in succeed(call("drain", tmp_path))
    assert drained(tmp_path) == []
    assert names_in(tmp_path) == []
    assert "does not exist" in fail(call("drain", tmp_path / "none"))
    (tmp_path / "file").touch()
    assert "is not a directory" in fail(call("drain", tmp_path / "file"))
    assert "ever saved" in fail(call("drain", tmp_path, "--forget", tmp_path / "a"))
    fail(call("drain", tmp_path, "--rate", "much"), 2)


def test_the_rate_is_kept(saves: Saver) -> None:
    saves.save("a.pt", bytes(LARGE))
    (one,) = drained(saves.fast, "--rate", "16M")
    assert one["seconds"] > 1


def test_so_many_copies_of_each_directory_stay_on_the_tier(saves: Saver) -> None:
    (saves.slow / "other").mkdir()
    paths = [saves.save(name) for name in ("other/a.pt", "a.pt", "b.pt", "c.pt")]
    succeed(call("drain", saves.fast, "--keep-last", "2"))
    stay = [paths[0], *paths[2:]]
    assert [copy.path for copy in saves.copies()] == [str(path) for path in stay]
    assert all(path.exists() for path in paths)
    fail(call("drain", saves.fast, "--keep-last", "0"), 2)


def test_a_terminal_gets_a_bar(saves: Saver) -> None:
    saves.save("a.pt", bytes(LARGE))
    code, seen = on_terminal("drain", str(saves.fast), "--rate", "16M")
    assert code == 0
    assert "32.0" in seen  # the size in MiB, in the bar and in the final line
    assert re.search(r"\d MB/s|\d MiB/s|/s", seen)
    assert "drained, 32.0 MiB in" in seen


@pytest.mark.long
def test_it_waits_for_its_turn_in_the_destinations_pool(saves: Saver) -> None:
    path = saves.save("a.pt", bytes(LARGE))  # small files take no slot
    with coordinator("redis") as address, writers() as make:
        at = {"IOSHAPE_POOL": "shared", "IOSHAPE_SLOTS": "1"}
        nobody = call("drain", saves.fast, env={**at, **NOBODY})
        assert nobody.returncode == 1
        assert "cannot connect to redis" in nobody.stderr
        at["IOSHAPE_COORDINATOR"] = address
        saver = make(address, '{"pool": "shared"}', job="direct", IOSHAPE_SLOTS="1")
        assert saver.hear() == "holds"
        with started("drain", saves.fast, "--rate", "1M", **at) as process:
            await_true(lambda: len(members(address, "waiters")) == 1, "the drain's request")
            assert not path.exists()
            # A direct save goes before the drain although it comes later.
            other = make(address, '{"pool": "shared"}', job="other", IOSHAPE_SLOTS="1")
            assert other.hear() == "waits"
            saver.tell("release")
            assert other.hear() == "holds"
            assert not path.exists()
            other.tell("release")
            # The status shows the drain's rate, and how much of the file is left.
            await_true(lambda: seen_at(address) > 0, "the drain's progress")
            (drain,) = members(address, "holders")
            assert 0 < drain["passed"] < drain["bytes"] <= LARGE + MIB
            assert process.wait(timeout=TIMEOUT_S) == 0
    assert path.stat().st_size == LARGE


# ---- Interrupted runs ----------------------------------------------------------------------------


@contextmanager
def started(*arguments: str | Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [IOSHAPE, *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line as soon as the process prints it."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    assert ready
    return process.stdout.readline()


def wait_until_writing(folder: Path) -> None:
    """Wait until the folder has a temporary file with data. It may be renamed during the check."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with suppress(FileNotFoundError):
            if any(entry.stat().st_blocks for entry in folder.iterdir()):
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_nothing_is_left_there(number: int, code: int, saves: Saver) -> None:
    path = saves.save("a.pt", os.urandom(LARGE))
    with started("drain", saves.fast, "--rate", "4M") as process:
        wait_until_writing(saves.slow)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, stderr) == (code, "")
    assert names_in(saves.slow) == []
    assert [one["result"] for one in drained(saves.fast)] == ["drained"]
    assert path.stat().st_size == LARGE


# ---- Watching ------------------------------------------------------------------------------------


def test_watching_carries_what_is_saved_later(saves: Saver) -> None:
    first = saves.save("first")
    with started("drain", saves.fast, "--watch") as process:
        assert line_of(process).startswith(f"{first}: drained")
        second = saves.save("second")
        assert line_of(process).startswith(f"{second}: drained")
        again = saves.save("first", b"again")
        assert line_of(process).startswith(f"{again}: drained")
        assert again.read_bytes() == b"again"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=TIMEOUT_S) == 0


def test_watching_tries_again_what_failed(saves: Saver) -> None:
    path = saves.save("a")
    (path / "inner").mkdir(parents=True)
    with started("drain", saves.fast, "--watch", "--json") as process:
        one = json.loads(line_of(process))
        assert (one["result"], one["path"]) == ("failed", str(path))
        (path / "inner").rmdir()
        path.rmdir()
        while one["result"] == "failed":
            one = json.loads(line_of(process))
        assert one["result"] == "drained"
        process.terminate()
        assert process.wait(timeout=TIMEOUT_S) == 143


def test_watching_begins_before_anything_is_saved(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    with started("drain", tmp_path / "fast", "--watch") as process, saver(tmp_path) as later:
        path = later.save("a")
        assert line_of(process).startswith(f"{path}: drained")


UNMOUNTED = """
    import contextlib, subprocess, sys, time
    from pathlib import Path
    from command import IOSHAPE
    from tiers import Saver

    fast, slow = Path("disk").absolute(), Path("slow").absolute()

    def saved(name):
        saver = Saver(Path().absolute(), fast)
        with contextlib.closing(saver.tier):
            return saver.save(name)

    def must_say(stream, expected):
        line = stream.readline()  # its timeout is that of the whole program
        assert line.startswith(expected), line

    def unmount():
        while subprocess.run(["umount", fast], capture_output=True).returncode:
            time.sleep(0.05)  # it is looked at just now

    first = saved("a")
    with subprocess.Popen(
        [IOSHAPE, "drain", fast, "--watch"], stdout=-1, stderr=-1, text=True
    ) as watch:
        try:
            must_say(watch.stdout, f"{first}: drained")
            for name in ("b", "c"):
                unmount()
                must_say(
                    watch.stderr, f"ioshape: the tier {fast} is gone; waiting until it is back"
                )
                assert not list(fast.iterdir())
                subprocess.run(["mount", "-o", "loop", "disk.image", fast], check=True)
                must_say(watch.stderr, f"ioshape: the tier {fast} is back")
                path = saved(name)
                must_say(watch.stdout, f"{path}: drained")
        finally:
            watch.terminate()
    assert sorted(one.name for one in slow.iterdir()) == ["a", "b", "c"]
"""


def test_watching_goes_on_when_the_tier_was_unmounted(tmp_path: Path) -> None:
    run_where_mounted(small_disk("ext4", tmp_path), tmp_path, UNMOUNTED)


# ---- Object stores -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with object_store.moto(tmp_path_factory.mktemp("moto")) as store:
        yield store


@pytest.fixture
def store(server: Store) -> Iterator[Store]:
    """Yield the server without objects and without faults."""
    server.harm()
    yield server
    server.harm()
    for key in server.objects():
        server.client.delete_object(Bucket=BUCKET, Key=key)


@pytest.mark.long
def test_what_was_drained_is_uploaded_once(saves: Saver, store: Store) -> None:
    path = saves.save("a.pt")
    folder = saves.save_group(1)

    def upload() -> list[tuple[str, str]]:
        done = call("drain", saves.fast, "--to", RUN, "--json", env=store.variables)
        assert done.returncode == 0, done.stderr
        return [(one["result"], one["url"] or one["path"]) for one in json.loads(done.stdout)]

    assert upload() == [
        ("drained", str(path)),
        ("drained", str(folder)),
        ("uploaded", f"{RUN}{path}"),
        ("uploaded", f"{RUN}{folder}"),
    ]
    assert f"run{path}" in store.objects()
    assert f"run{folder}/manifest.json" in store.objects()
    assert upload() == []
    saves.save("a.pt", b"again")
    assert upload() == [("drained", str(path)), ("uploaded", f"{RUN}{path}")]
    body = store.client.get_object(Bucket=BUCKET, Key=f"run{path}")["Body"].read()
    assert body == b"again"


@pytest.mark.long
def test_what_does_not_stay_on_the_tier_is_uploaded_before_it_goes(
    saves: Saver, store: Store
) -> None:
    first = saves.save("a.pt")
    assert [one["path"] for one in drained(saves.fast)] == [str(first)]
    paths = [first, *(saves.save(name) for name in ("b.pt", "c.pt"))]
    succeed(call("drain", saves.fast, "--to", RUN, "--keep-last", "1", env=store.variables))
    assert [copy.path for copy in saves.copies()] == [str(paths[-1])]
    assert store.objects() == [f"run{path}" for path in paths]


@pytest.mark.slow
def test_an_older_one_is_not_uploaded(saves: Saver, store: Store) -> None:
    path = saves.save("a.pt")
    succeed(call("drain", saves.fast))
    path.write_bytes(b"direct")
    later = time.time_ns() + 10**9
    os.utime(path, ns=(later, later))
    succeed(call("drain", saves.fast, "--to", RUN, env=store.variables))
    assert store.objects() == []


@pytest.mark.long
def test_a_killed_upload_is_no_checkpoint_and_is_gone_on_with(saves: Saver, store: Store) -> None:
    folder = saves.save_group(1)
    store.harm(kill_at=2, pid=0)
    with started("drain", saves.fast, "--to", RUN, **store.variables) as process:
        store.harm(kill_at=2, pid=process.pid)
        process.wait(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGKILL
    listed = call("ls", RUN, env=store.variables)
    assert "There is no complete checkpoint" in listed.stdout
    text = succeed(call("drain", saves.fast, "--to", RUN, env=store.variables))
    assert text.startswith(f"{folder}: uploaded to {RUN}{folder}, ")
    assert f"{RUN}{folder}" in succeed(call("ls", RUN, env=store.variables))


@pytest.mark.slow
def test_an_upload_that_fails_is_said_and_tried_again(saves: Saver, store: Store) -> None:
    path = saves.save("a.pt")
    store.harm(deny=True)
    done = call("drain", saves.fast, "--to", RUN, env=store.variables)
    assert done.returncode == 1
    assert "the server denies access" in done.stderr
    assert path.exists()
    store.harm()
    text = succeed(call("drain", saves.fast, "--to", RUN, env=store.variables))
    assert text.startswith(f"{path}: uploaded")
    assert "not an address" in fail(call("drain", saves.fast, "--to", "gs://bucket"))


# ---- ioshape ls ----------------------------------------------------------------------------------


def test_ls_tells_what_waits(saves: Saver) -> None:
    old = saves.save("old")
    succeed(call("drain", saves.fast))
    folder = saves.save_group(1)
    lines = succeed(call("ls", saves.fast)).splitlines()
    assert lines[0].split() == ["path", "saved", "kind", "size", "state"]
    assert lines[1].split()[0] == str(folder)
    assert [lines[1].split()[3], *lines[1].split()[5:]] == ["directory", "KiB", "waits"]
    assert lines[2].split()[0] == str(old)
    assert lines[2].endswith("drained")
    assert re.fullmatch(r"2 checkpoints, [0-9.]+ KiB; [0-9.]+ KiB not drained yet", lines[-1])
    found = json.loads(succeed(call("ls", saves.fast, "--json")))
    assert found["tier"] == str(saves.fast)
    assert [(one["path"], one["state"]) for one in found["copies"]] == [
        (str(folder), "waits"),
        (str(old), "drained"),
    ]
    assert Path(found["copies"][0]["copy_path"], "manifest.json").exists()


def test_ls_tells_what_is_drained_now(saves: Saver) -> None:
    saves.save("a.pt", os.urandom(LARGE))
    saves.save("b.pt")
    with started("drain", saves.fast, "--rate", "4M"):
        wait_until_writing(saves.slow)
        found = json.loads(succeed(call("ls", saves.fast, "--json")))
    assert [one["state"] for one in found["copies"]] == ["is drained now", "waits"]


def test_ls_of_an_empty_tier(saves: Saver) -> None:
    assert succeed(call("ls", saves.fast)) == f"There is no checkpoint on {saves.fast}.\n"


# ---- A folder that another user has created ------------------------------------------------------

OTHER = 65533  # owner of the folder that should be ours


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """Return a tier where another user has created our folder, as any user can."""
    fast = tmp_path / "fast"
    fast.mkdir()
    fast.chmod(0o1777)
    own = fast / f"ioshape-{os.geteuid()}"
    for folder in (own, own / "files", own / "journal"):
        folder.mkdir()
    for folder in (own / "files", own / "journal", own):
        os.chown(folder, OTHER, OTHER)
    return fast


def test_a_folder_that_another_user_has_made_is_said(taken: Path) -> None:
    said = fail(call("drain", taken))
    assert f"ioshape-{os.geteuid()} belongs to user {OTHER}" in said
    assert "ask the administrator to remove it" in said


def test_commands_go_on_with_the_rest(taken: Path) -> None:
    listed = call("ls", taken)
    assert "There is no checkpoint" in listed.stdout
    assert f"belongs to user {OTHER}" in listed.stderr
    assert not json.loads(call("doctor", taken, "--json").stdout)["tier"]["usable"]


def test_a_save_goes_directly_and_says_whose_the_folder_is(taken: Path, tmp_path: Path) -> None:
    report = ioshape.save({"a": torch.ones(3)}, tmp_path / "model.pt", tier=str(taken))
    assert report.tier == ""
    assert any(f"it belongs to user {OTHER}" in str(one) for one in report.downgrades)
    assert (tmp_path / "model.pt").exists()


def test_an_operator_sees_the_tiers_of_the_others(taken: Path) -> None:
    """Check that an operator sees other users' tiers. Pipes and links must not trap the command."""
    sound, trap = taken / "ioshape-1001", taken / "ioshape-1002"
    for folder in (sound, sound / "files", sound / "journal", trap, trap / "files"):
        folder.mkdir()
    (trap / "journal").symlink_to("/etc")
    os.mkfifo(sound / "drain.lock")
    (sound / "files" / "away").symlink_to("/usr")
    (sound / "journal" / f"{1:020}").symlink_to("0 0 /away/bin")
    for folder, owner in ((sound, 1001), (trap, 1002)):
        os.chown(folder, owner, owner)
    (one,) = tiers_at(str(taken))
    assert (one.user, one.waiting, one.waiting_bytes) == (1001, 1, 0)
