# SPDX-License-Identifier: Apache-2.0
"""`ioshape run PROGRAM`: programs other than Python scripts take slots for large writes."""

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import TIMEOUT_S
from records import is_ours

COMMAND = [str(Path(sysconfig.get_path("scripts")) / "ioshape"), "run"]
MIB = 1 << 20

Done = subprocess.CompletedProcess[str]


def run(command: Sequence[str], folder: Path, **more: str) -> Done:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env.update(
        IOSHAPE_COORDINATOR=f"local:{folder}",
        IOSHAPE_SLOTS="1",
        IOSHAPE_PRELOAD_BYTES="1M",
        IOSHAPE_PRELOAD_LOG=str(folder / "log"),
    )
    return subprocess.run(
        command,
        cwd=folder,
        env={**env, **more},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def log(folder: Path, lines: int) -> list[str]:
    """Return the lines of the log, once there are as many. Holders end a moment after programs."""
    path, found = folder / "log", list[str]()
    deadline = time.monotonic() + 10
    while len(found) < lines and time.monotonic() < deadline:
        time.sleep(0.02)
        found = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return found


def test_a_program_takes_a_slot(tmp_path: Path) -> None:
    data = os.urandom(8 * MIB)
    (tmp_path / "from").write_bytes(data)
    done = run([*COMMAND, "--all-writes", "cp", "from", "to"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "to").read_bytes() == data
    [line] = log(tmp_path, 1)
    assert re.search(rf'program="cp" path="{tmp_path}/to" .* bytes=\d+ end=(close|exit)$', line)


def test_on_a_filesystem_of_this_host_it_takes_none(tmp_path: Path) -> None:
    (tmp_path / "from").write_bytes(bytes(8 * MIB))
    assert run([*COMMAND, "cp", "from", "to"], tmp_path).returncode == 0
    assert all("end=local" in line for line in log(tmp_path, 0))


@pytest.mark.parametrize("name", ["program", "./program"])
def test_a_program_sees_no_difference(name: str, tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_text('#!/bin/sh\necho "$0" "$@"; cat; echo oops >&2; exit 3\n', encoding="utf-8")
    path.chmod(0o700)
    plain = run([f"./{path.name}", "--no-load", "a b"], tmp_path)
    done = run([*COMMAND, name, "--no-load", "a b"], tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr) == (3, "oops\n")
    assert done.stdout.replace("./", "") == plain.stdout.replace("./", "")


@pytest.mark.slow
def test_scripts_below_a_program_save_through_ioshape(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch; torch.save({'a': torch.ones(3)}, 'model.pt')", encoding="utf-8"
    )
    command = f'"{sys.executable}" train.py'
    done = run([*COMMAND, "sh", "-c", command], tmp_path, IOSHAPE_DURABLE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert is_ours(tmp_path / "model.pt")


@pytest.mark.slow
def test_a_save_takes_one_slot_and_other_writes_one_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch
torch.save({"a": torch.ones(2 << 20)}, "model.pt")
with open("other", "wb") as file:
    for _ in range(8):
        file.write(bytes(1 << 20))
""",
        encoding="utf-8",
    )
    # The engine calls pwrite(), which the preload library sees.
    done = run([*COMMAND, "--all-writes", "train.py"], tmp_path, IOSHAPE_ENGINE="buffered")
    assert (done.returncode, done.stderr) == (0, "")
    assert is_ours(tmp_path / "model.pt")
    [line] = log(tmp_path, 1)
    assert f'path="{tmp_path}/other"' in line


def test_other_preloaded_libraries_stay_first(tmp_path: Path) -> None:
    show = ["sh", "-c", 'echo "$LD_PRELOAD $IOSHAPE_PRELOAD_ALL"']
    done = run([*COMMAND, *show], tmp_path, LD_PRELOAD="libpthread.so.0 libdl.so.2")
    before, middle, ours = done.stdout.strip().split(":")
    assert (before, middle) == ("libpthread.so.0", "libdl.so.2")
    assert ours.endswith("/libioshape-preload.so")
    again = run([*COMMAND, "--all-writes", *show], tmp_path, LD_PRELOAD=ours)
    assert again.stdout == f"{ours} yes\n"


def test_without_the_library(tmp_path: Path) -> None:
    done = run([*COMMAND, "--no-preload", "sh", "-c", 'echo "$LD_PRELOAD."'], tmp_path)
    assert done.stdout == ".\n"


def test_a_program_that_cannot_start_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"\x7fELF damaged")
    path.chmod(0o700)
    done = run([*COMMAND, "./program"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ioshape: cannot start ./program: Exec format error\n"
