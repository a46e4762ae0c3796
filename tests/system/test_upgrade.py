# SPDX-License-Identifier: Apache-2.0
"""Test two versions in each format that they share: they coexist, or refuse with a message.

The later version is this tree with other numbers for all its formats (tests/support/later.sh).
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from coordinators import Writer, coordinator, writers
from processes import TIMEOUT_S, environment
from tree import PYTHONPATH, ROOT

LATER = ROOT / "build" / "later" / "site"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not LATER.is_dir(), reason="the later version is not built: run tests/support/later.sh"
    ),
]

#: Variables with which a program uses the later version.
IS_LATER = {"PYTHONPATH": f"{LATER}{os.pathsep}{PYTHONPATH}"}
IS_OURS: dict[str, str] = {}

BOTH = pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(IS_OURS, IS_LATER, id="later"),
        pytest.param(IS_LATER, IS_OURS, id="earlier"),
    ],
)

# Prints the parts of an error that programs use. Its message is for people.
PRELUDE = """
import sys
from pathlib import Path
import ioshape, torch

def attempt(call):
    try:
        print(call())
    except ioshape.StorageError as error:
        print("refused", error.errno, bool(error.sentence), error.path or "")
"""


def start(program: str, *arguments: object, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        text=True,
    )


def said_by(process: subprocess.Popen[str]) -> list[str]:
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    return said.splitlines()


def run(program: str, *arguments: object, **more: str) -> list[str]:
    return said_by(start(program, *arguments, **more))


def must_hold(writer: Writer) -> None:
    writer.tell("lost")
    assert writer.hear() == "False"


@pytest.mark.parametrize("kind", ["local", "redis"])
@BOTH
def test_each_version_has_a_pool_of_its_own(
    kind: str, first: dict[str, str], second: dict[str, str]
) -> None:
    with coordinator(kind) as address, writers() as writer:
        common = {"IOSHAPE_SLOTS": "1", "IOSHAPE_POOL": "scratch"}
        holders = []
        for version in (first, second):
            holders.append(writer(address, "{}", **common, **version))
            assert holders[-1].hear() == "holds"
        waiters = []
        for version in (first, second):
            waiters.append(writer(address, "{}", **common, **version))
            assert waiters[-1].hear() == "waits"
        for holder, waiter in zip(holders, waiters, strict=True):
            must_hold(holder)
            holder.tell("release")
            assert holder.hear() == "released"
            assert waiter.hear() == "holds"
        for waiter in waiters:
            must_hold(waiter)


SAVE = "ioshape.save_group({'step': int(sys.argv[2])}, sys.argv[1], int(sys.argv[2]))"
LOAD = """
attempt(lambda: ioshape.latest(sys.argv[1]).step)
attempt(lambda: ioshape.load_group(sys.argv[1])["step"])
attempt(lambda: ioshape.load_group(sys.argv[1], step=int(sys.argv[2]))["step"])
attempt(lambda: ioshape.load_group(sys.argv[1], step=int(sys.argv[3]))["step"])
"""


@BOTH
def test_a_checkpoint_of_another_version_is_refused_and_no_older_one_taken_for_it(
    first: dict[str, str], second: dict[str, str], tmp_path: Path
) -> None:
    run(SAVE, tmp_path, 1, **first)
    run(SAVE, tmp_path, 2, **second)
    refused = f"refused {errno.EOPNOTSUPP} True"
    for line in (said := run(LOAD, tmp_path, 1, 2, **first))[:2] + said[3:]:
        assert line.startswith(refused), said
    assert said[2] == "1"
    said = run(LOAD, tmp_path, 1, 2, **second)
    assert said[:2] == ["2", "2"]
    assert said[2].startswith(refused), said
    assert said[3] == "2"


@BOTH
def test_a_checkpoint_of_another_version_is_not_removed(
    first: dict[str, str], second: dict[str, str], tmp_path: Path
) -> None:
    for step, version in ((1, second), (2, first), (3, first), (4, second)):
        run(SAVE, tmp_path, step, **version)
    run("ioshape.prune(sys.argv[1], keep_last=1)", tmp_path, **first)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step:010}" for step in (1, 3, 4)
    ]
    assert run(LOAD, tmp_path, 1, 4, **second) == ["4", "4", "1", "4"]


MEET = "attempt(lambda: ioshape.save_group({}, sys.argv[1], 1) and 'saved')"


@pytest.mark.parametrize("kind", ["local", "redis"])
@BOTH
def test_ranks_of_two_versions_do_not_meet_and_say_so(
    kind: str, first: dict[str, str], second: dict[str, str], tmp_path: Path
) -> None:
    def meet(versions: list[dict[str, str]], address: str, deadline_ms: int) -> list[str]:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "IOSHAPE_JOB": tmp_path.name}
        common |= {"IOSHAPE_COORDINATOR": address, "IOSHAPE_DEADLINE_MS": str(deadline_ms)}
        ranks = [
            start(MEET, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **common, **version)
            for rank, version in enumerate(versions)
        ]
        return [line for rank in ranks for line in said_by(rank)]

    with coordinator(kind) as address:
        for line in meet([first, second], address, 3000):
            assert line.startswith(f"refused {errno.ETIMEDOUT} True"), line
        assert meet([first, first], address, 60_000) == ["saved", "saved"]


def test_a_file_of_another_version_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    run("ioshape.save({'a': torch.arange(5)}, sys.argv[1])", path, **IS_LATER)
    said = run("print(torch.load(sys.argv[1])['a'].tolist())", path)
    said += run("attempt(lambda: ioshape.load(sys.argv[1])['a'].tolist())", path)
    assert said == ["[0, 1, 2, 3, 4]"] * 2
