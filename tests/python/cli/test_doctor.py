# SPDX-License-Identifier: Apache-2.0
"""`ioshape doctor` on real filesystems, under real limits, with real coordinators."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import command
import ioshape
import pytest
import torch
from coordinators import running_redis
from ioshape._cli.doctor import EXIT_SERIOUS
from ioshape._cli.doctor_facts import Coordination, Folder, Host, Installation, _is_filtered
from ioshape._cli.doctor_findings import SEVERITIES, Finding
from mounts import client_of
from striped import striped
from tiers import saver

SECRET = "tr0ub4dor"
MIB = 1 << 20


def call(*arguments: str | Path, prefix: Sequence[str] = (), **variables: str) -> command.Done:
    return command.call("doctor", *arguments, prefix=prefix, env=variables)


def probed(
    *arguments: str | Path,
    prefix: Sequence[str] = (),
    **variables: str,
) -> dict[str, Any]:
    """Return the JSON report, with its findings in a dictionary by id."""
    done = call("--json", *arguments, prefix=prefix, **variables)
    found: dict[str, Any] = json.loads(done.stdout)
    serious = any(one["severity"] == "serious" for one in found["findings"])
    assert done.returncode == (EXIT_SERIOUS if serious else 0), done.stderr
    found["findings"] = {one["id"]: one for one in found["findings"]}
    return found


def names(of: type) -> set[str]:
    return {field.name for field in fields(of)}


# ---- Filesystems ---------------------------------------------------------------------------------


def test_a_folder_is_described_and_left_alone(tmp_path: Path) -> None:
    done = call("--json", tmp_path)
    assert not done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        "path",
        "ranks",
        "files",
        "storage",
        "folder",
        "host",
        "coordination",
        "installation",
        "tier",
        "findings",
    }
    assert found["tier"] is None
    assert set(found["storage"]) == names(ioshape.types.Storage)
    assert set(found["folder"]) == names(Folder)
    assert set(found["host"]) == names(Host)
    assert set(found["coordination"]) == names(Coordination)
    assert set(found["installation"]) == names(Installation)
    assert found["installation"]["ioshape"] == ioshape.__version__
    assert found["installation"]["torch"] == torch.__version__
    for one in found["findings"]:
        assert set(one) == names(Finding)
        assert one["severity"] in SEVERITIES
    storage = found["storage"]
    system = os.statvfs(tmp_path)
    assert found["path"] == str(tmp_path)
    assert storage["directory"] == str(tmp_path.resolve())
    assert storage["total_bytes"] == system.f_blocks * system.f_frsize
    assert Path(storage["mount_point"]) in [tmp_path.resolve(), *tmp_path.resolve().parents]
    assert storage["engine"]
    assert storage["block_bytes"] * storage["queue_depth"] > 0
    assert storage["pool"] == ioshape.probe(tmp_path).pool
    assert not found["coordination"]["error"]
    assert list(tmp_path.iterdir()) == []


def test_python_gets_the_same(tmp_path: Path) -> None:
    storage = ioshape.probe(tmp_path / "model.pt", nbytes=123, files=2)
    assert storage.for_bytes == 123
    seen = probed(tmp_path / "model.pt", "--for", "123", "--ranks", "2")["storage"]
    mine = asdict(storage)
    for changing in ("free_bytes", "targets"):
        mine.pop(changing), seen.pop(changing)
    assert mine == seen
    with pytest.raises(FileNotFoundError) as caught:
        ioshape.probe(tmp_path / "none" / "model.pt")
    assert caught.value.filename == str(tmp_path / "none" / "model.pt")
    with pytest.raises(AttributeError):
        storage.family = "lustre"  # type: ignore[misc]


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b'a"\\\n\xff')
    folder.mkdir()
    assert ioshape.probe(folder).directory == str(folder.resolve())


def test_a_file_a_link_and_a_pipe_mean_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for name, is_file in (("file", True), ("link", True), ("pipe", False)):
        for path in (tmp_path / name, name):
            found = ioshape.probe(path)
            assert (found.directory, found.is_file) == (str(tmp_path.resolve()), is_file)
    with pytest.raises(NotADirectoryError):
        ioshape.probe(tmp_path / "file" / "new.pt")


def test_a_name_that_is_not_there_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    for there in ("new.pt", "new/"):
        found = probed(f"{tmp_path}/{there}")
        assert found["storage"]["directory"] == str(tmp_path.resolve())
        assert not found["storage"]["is_file"]
    done = call(tmp_path / "none" / "new.pt")
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.count("\n") == 1


def test_people_get_tables_and_remedies(tmp_path: Path) -> None:
    done = call(tmp_path, "--for", "2G", prefix=["prlimit", f"--fsize={MIB}"])
    lines = done.stdout.splitlines()
    for title in ("storage", "a save of 2.00 GiB", "slots"):
        assert title in lines
    finding = next(line for line in lines if line.startswith("serious: this process cannot"))
    assert finding.endswith("; raise the limit with ulimit -f unlimited")
    assert not any(letter < " " for line in lines for letter in line)  # no colours


def apart(mount: str, *at: Path) -> list[str]:
    """Return the prefix of a command that alone sees a mount."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    alone = ["unshare", "--mount", *root, "sh", "-c", f'{mount} && exec "$@"', *map(str, at)]
    tried = subprocess.run([*alone, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine does not do {mount} ({tried.stderr.strip()})")
    return alone


def test_memory_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    prefix = apart('mount -t tmpfs -o size=3g none "$0"', tmp_path)
    found = probed(tmp_path, prefix=prefix)
    assert found["storage"]["family"] == "tmpfs"
    assert found["findings"]["in-memory"]["severity"] == "serious"
    # The mount is too small, too.
    assert found["findings"]["no-space"]["severity"] == "serious"
    shown = call(tmp_path, "--for", "1M", prefix=prefix)
    assert shown.returncode == EXIT_SERIOUS
    assert "serious: " in shown.stdout


def test_the_layer_of_a_container_is_known(tmp_path: Path) -> None:
    # The test's folder may be on an overlay already, which cannot hold another one. A tmpfs can.
    mounts = (
        'mount -t tmpfs none "$0" && mkdir "$0/u" "$0/l" "$0/w" "$0/m" && '
        'mount -t overlay -o "lowerdir=$0/l,upperdir=$0/u,workdir=$0/w" overlay "$0/m"'
    )
    found = probed(tmp_path / "m", prefix=apart(mounts, tmp_path))
    assert found["storage"]["family"] == "overlay"
    assert found["findings"]["container-layer"]


def test_a_mount_may_be_read_only(tmp_path: Path) -> None:
    prefix = apart('mount -t tmpfs -o ro none "$0"', tmp_path)
    assert probed(tmp_path, prefix=prefix)["findings"]["read-only"]["severity"] == "serious"


# ---- Striped filesystems -------------------------------------------------------------------------


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_stripes_and_targets_are_shown_and_judged() -> None:
    source = "10.0.0.1@tcp:/storm"
    with striped("ssd", targets=8, fsname=source, used=["3=63Gi"]) as mount:
        prefix = client_of(mount.backing)
        found = probed(mount.path, prefix=prefix)
        plain = probed(mount.path, prefix=prefix, IOSHAPE_LAYOUT="directory")
        shown = call(mount.path, prefix=prefix).stdout
    storage = found["storage"]
    assert (storage["family"], storage["source"]) == ("lustre", source)
    assert (storage["stripes"], storage["stripe_count"]) == ("1 x 1M", 1)
    assert storage["stripes_asked"] == "8 x 1M"
    assert storage["writers"] == 1
    assert storage["target_count"] == len(storage["targets"]) == 8
    free = {one["name"]: one["free_bytes"] >> 30 for one in storage["targets"]}
    assert free == {f"storm-OST000{i}": 1 if i == 3 else 64 for i in range(8)}
    findings = found["findings"]
    assert findings["target-full"]["severity"] == "serious"
    assert "storm-OST0003 98%" in findings["target-full"]["sentence"]
    assert plain["storage"]["stripes_asked"] == ""
    assert plain["storage"]["writers"] == 8
    assert "storm-OST0003  64.0 GiB  1.00 GiB   98%" in shown.splitlines()
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("storm-OST")]
    assert rows == sorted(free)


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_a_file_has_a_layout_of_its_own() -> None:
    with striped("ssd", targets=8, play="beegfs") as mount:
        path = mount.path / "model.pt"
        path.write_bytes(b"x")
        found = probed(path)
    assert found["storage"]["family"] == "beegfs"
    assert found["storage"]["is_file"]
    assert found["storage"]["file_stripes"] == "1 x 1M"


# ---- Folders without permission ------------------------------------------------------------------

#: Prefix of a command that drops the capabilities by which root ignores permissions.
AS_OTHERS = (
    ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
    if os.geteuid() == 0
    else []
)


def test_a_folder_may_be_somebody_elses(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    found = probed(tmp_path, prefix=AS_OTHERS)
    assert found["findings"]["not-writable"]["severity"] == "serious"
    tmp_path.chmod(0)
    done = call(tmp_path, prefix=AS_OTHERS)
    tmp_path.chmod(0o755)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


# ---- Limits --------------------------------------------------------------------------------------

#: Refuse io_uring to this process and its children by seccomp, as container runtimes do.
REFUSED = """
import ctypes, errno, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = b"".join(struct.pack("HBBI", *step) for step in (
    (0x20, 0, 0, 0),  # load the call's number
    (0x15, 0, 1, 425),  # io_uring_setup, on all machines
    (0x06, 0, 0, 0x00050000 | errno.EPERM),
    (0x06, 0, 0, 0x7FFF0000),
))
steps = ctypes.create_string_buffer(code, len(code))
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(steps))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_the_tier_is_looked_at_and_left_alone(tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    assert not probed(tmp_path, IOSHAPE_TIER=str(fast))["tier"]["usable"]
    assert f"{fast}, which saves cannot use" in call(tmp_path, IOSHAPE_TIER=str(fast)).stdout
    fast.mkdir()
    found = probed(tmp_path, IOSHAPE_TIER=str(fast))
    assert "tier-not-local" in found["findings"]  # tier and destination are one filesystem
    assert list(fast.iterdir()) == []
    with saver(tmp_path) as saves:
        saves.save("drained")
        saves.tier.drain()
        saves.save("waits", b"1234")
        place = next(one.copy_path for one in saves.copies() if one.is_waiting)
        os.utime(place, (0, 0))
        found = probed(fast)  # the path is the tier itself
    tier = found["tier"]
    assert (tier["folder"], tier["waiting"], tier["waiting_bytes"]) == (str(fast), 1, 4)
    assert not tier["draining"]
    assert found["findings"]["tier-waits"]["remedy"] == f"run ioshape drain {fast}"
    assert "tier-not-local" not in found["findings"]
    text = call(fast).stdout
    assert re.search(r"^the tier\n  folder +.*fast$", text, re.MULTILINE)


def test_a_sandbox_that_refuses_io_uring_is_named(tmp_path: Path) -> None:
    found = probed(tmp_path, prefix=[sys.executable, "-c", REFUSED])
    assert found["storage"]["engine"] == "threads"
    assert "seccomp" in found["findings"]["no-io-uring"]["sentence"]
    assert "io_uring_setup" in found["findings"]["no-io-uring"]["remedy"]


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    found = probed(tmp_path, prefix=["prlimit", f"--fsize={MIB}"])["findings"]
    assert found["file-size-limit"]["severity"] == "serious"


@pytest.mark.parametrize(("line", "filtered"), [("0", False), ("1", True), ("2", True)])
def test_a_filter_is_seen(line: str, filtered: bool) -> None:
    assert _is_filtered(f"Name:\tx\nSeccomp:\t{line}\nSeccomp_filters:\t1\n") == filtered
    assert not _is_filtered("Name:\tx\n")


# ---- Coordinators --------------------------------------------------------------------------------


def test_a_coordinator_out_of_reach_is_a_finding_without_its_password(tmp_path: Path) -> None:
    with socket.socket() as port:  # bound, so that no other process listens there
        port.bind(("127.0.0.1", 0))
        address = f"redis://:{SECRET}@127.0.0.1:{port.getsockname()[1]}"
        done = call("--json", tmp_path, IOSHAPE_COORDINATOR=address)
        shown = call(tmp_path, IOSHAPE_COORDINATOR=address, IOSHAPE_UNREACHABLE="fail")
    found = {one["id"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["coordinator-away"]["severity"] == "warning"
    assert shown.returncode == EXIT_SERIOUS
    assert "unreachable=fail" in shown.stdout
    for text in (done.stdout, done.stderr, shown.stdout, shown.stderr):
        assert SECRET not in text


def test_a_redis_is_asked(tmp_path: Path) -> None:
    with running_redis(SECRET) as redis:
        found = probed(tmp_path, IOSHAPE_COORDINATOR=redis.address, IOSHAPE_PASSWORD=SECRET)
        refused = probed(tmp_path, IOSHAPE_COORDINATOR=redis.address, IOSHAPE_PASSWORD="wr0ng")
    assert not found["coordination"]["error"]
    assert 0 < found["coordination"]["latency_s"] < 1
    assert "coordinator-away" not in found["findings"]
    assert "coordinator-away" in refused["findings"]
    assert "wr0ng" not in json.dumps(refused)


# ---- Installation --------------------------------------------------------------------------------


def test_a_password_that_others_can_read_is_named_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "the password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o644)
    with running_redis(SECRET) as redis:
        given = {"IOSHAPE_COORDINATOR": redis.address, "IOSHAPE_PASSWORD_FILE": str(file)}
        found = probed(tmp_path, **given)
        finding = found["findings"]["password-readable"]
        file.chmod(0o440)
        fixed = probed(tmp_path, **given)
    assert not found["coordination"]["error"]
    assert "all users" in finding["sentence"]
    assert "password-readable" not in fixed["findings"]
    assert SECRET not in json.dumps([found, fixed])


def test_a_setting_that_cannot_be_used_is_told_first(tmp_path: Path) -> None:
    done = call(tmp_path, IOSHAPE_ENGINE="warp", IOSHAPE_COORDINATR="local")
    assert (done.returncode, done.stdout) == (2, "")
    assert "IOSHAPE_ENGINE" in done.stderr
    assert "IOSHAPE_COORDINATOR" in done.stderr  # the nearest setting
    missing = str(tmp_path / "none")
    given = {"IOSHAPE_COORDINATOR": "redis://h", "IOSHAPE_PASSWORD_FILE": missing}
    finding = probed(tmp_path, **given)["findings"]["password-unreadable"]
    assert missing in finding["sentence"]


def test_shared_memory_that_is_full_or_read_only_is_named(tmp_path: Path) -> None:
    for options, words in (("size=64k", "64.0 KiB left"), ("ro", "not writable")):
        prefix = apart(f"mount -t tmpfs -o {options} none /dev/shm", tmp_path)
        found = probed(tmp_path, prefix=prefix, IOSHAPE_COORDINATOR="open")
        assert words in found["findings"]["no-shared-memory"]["sentence"]
