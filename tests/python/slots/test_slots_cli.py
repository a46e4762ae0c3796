# SPDX-License-Identifier: Apache-2.0
"""The operator's commands slots, top and exporter, as processes, with real coordinators."""

import fcntl
import json
import os
import pty
import pwd
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
from command import IOSHAPE
from coordinators import (
    TIMEOUT_S,
    Redis,
    Writer,
    await_true,
    coordinator,
    node,
    running_redis,
    short_folder,
    writers,
)
from exporters import exporter
from ioshape._cli.exporter import _MOST_JOBS, PoolCollector
from ioshape._cli.pools import table_of
from ioshape._cli.top import PoolRates, Rates
from ioshape._slots.pools import Member, Operator, PoolJob, PoolStatus
from nodes import run_ranks
from processes import environment, run_program, started_program
from tiers import saver, undrained
from tree import ROOT, program

POOL = "test:shared"
SECRET = "tr0ub4dor"


@pytest.fixture(params=["local", "redis"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with coordinator(request.param) as value:
        yield value


@pytest.fixture
def write(address: str) -> Iterator[Callable[..., Writer]]:
    """Yield a function that starts writers in the pool, which admits one at a time."""
    with writers() as make:

        def made(job: str, rank: int = 0, **asked: Any) -> Writer:
            asked = {"pool": POOL, **asked}
            return make(address, json.dumps(asked), job=job, rank=rank, IOSHAPE_SLOTS="1")

        yield made


def call(*arguments: str | Path, typed: str = "", **variables: str) -> command.Done:
    return command.call(*arguments, typed=typed, env=variables)


def succeed(*arguments: str | Path, **variables: str) -> str:
    return command.succeed(call(*arguments, **variables))


def fail(code: int, *arguments: str | Path, **variables: str) -> str:
    """Return the error message, which must be one line on stderr."""
    done = call(*arguments, **variables)
    assert not done.stdout
    return command.fail(done, code)


def state(address: str, pool: str = POOL) -> dict[str, Any]:
    """Return the pool as `ioshape slots status --json` shows it."""
    (found,) = json.loads(succeed("slots", "status", pool, "--json", "--coordinator", address))
    assert isinstance(found, dict)
    return found


@pytest.fixture
def busy(address: str, write: Callable[..., Writer]) -> tuple[Writer, Writer]:
    """Return a writer that holds the only slot, and one that waits for it."""
    holder = write("4711", rank=7, nbytes=1 << 30)
    assert holder.hear() == "holds"
    holder.tell("pace 1000000")
    waiter = write("train", rank=3, nbytes=2 << 30)
    assert waiter.hear() == "waits"
    operator = Operator(address)
    await_true(lambda: operator.status(POOL).waiter_count == 1, "one that waits")
    return holder, waiter


# ---- Terminals -----------------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, width: int, height: int) -> None:
        self.controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.before = termios.tcgetattr(terminal)
        self.terminal = terminal
        self.process = subprocess.Popen(
            [IOSHAPE, *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment(TERM="xterm"),
            preexec_fn=self._take_terminal,  # noqa: PLW1509 - Ctrl-C comes from it
        )
        self.seen = ""

    def _take_terminal(self) -> None:
        os.setsid()
        fcntl.ioctl(self.terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def await_text(self, text: str) -> None:
        """Wait until the terminal shows a text."""
        await_true(lambda: self._read() and text in self.seen, text)

    def _read(self) -> bool:
        while select.select([self.controller], [], [], 0.01)[0]:
            part = os.read(self.controller, 65536)
            if not part:
                break
            self.seen += part.decode(errors="replace")
        return True

    def type(self, keys: str) -> None:
        os.write(self.controller, keys.encode())

    def end(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        end = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < end:
            self._read()
        self._read()
        return self.process.wait(1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.controller)
        os.close(self.terminal)


@contextmanager
def terminal(*arguments: str, width: int = 160, height: int = 40) -> Iterator[Terminal]:
    one = Terminal(*arguments, width=width, height=height)
    try:
        yield one
    finally:
        one.close()


# ---- slots status --------------------------------------------------------------------------------


@pytest.mark.slow
def test_status_has_who_holds_and_who_waits(address: str, busy: tuple[Writer, Writer]) -> None:
    holder, _ = busy
    # Holders report their progress with their heartbeats.
    operator = Operator(address)
    await_true(lambda: operator.status(POOL).holders[0].passed == 1_000_000, "the bytes")
    found = state(address)
    assert (found["pool"], found["capacity"], found["used"]) == (POOL, 1, 1)
    assert found["coordinator"] == ("local" if address.startswith("local") else "redis")
    assert found["capacity_by"] == "job"
    assert found["waiter_count"] == 1
    # Only Redis counts grants. Only the local coordinator shows process ids, which are valid on one
    # host.
    grants = address.startswith("unix")
    assert found["grants"] == (1 if grants else 0)
    (holds,), (waits,) = found["holders"], found["waiters"]
    assert (holds["job"], holds["rank"], holds["node"]) == ("4711", 7, node())
    assert (holds["weight"], holds["bytes"], holds["bypass"]) == (1, 1 << 30, False)
    assert holds["fence"] > 0
    assert (holds["pid"], waits["pid"]) == (
        (0, 0) if grants else (holder.process.pid, busy[1].process.pid)
    )
    assert (waits["job"], waits["rank"], waits["bytes"]) == ("train", 3, 2 << 30)
    assert holds["id"] != waits["id"]
    assert holds["since_s"] > 0
    assert 0 < holds["lease_s"] <= 15.1
    holder.tell("release")
    assert busy[1].hear() == "holds"
    found = state(address)
    assert (found["holders"][0]["id"], found["waiters"]) == (waits["id"], [])
    assert found["grants"] == (2 if grants else 0)


@pytest.mark.usefixtures("busy")
def test_status_is_a_table_for_people(address: str) -> None:
    lines = succeed("slots", "status", POOL, "--coordinator", address).splitlines()
    assert lines[0].startswith(f"{POOL} (")
    rows = [line.split() for line in lines[3:]]
    assert rows[0][:6] == ["state", "job", "node", "rank", "slots", "written"]
    assert rows[1][:5] == ["holds", "4711", node(), "7", "1"]
    assert rows[2][:5] == ["waits", "train", node(), "3", "1"]


@pytest.mark.usefixtures("busy")
def test_status_of_all_pools(address: str, write: Callable[..., Writer]) -> None:
    other = write("other", pool="a:other")
    assert other.hear() == "holds"
    found = json.loads(succeed("slots", "status", "--json", "--coordinator", address))
    assert [(one["pool"], one["used"]) for one in found] == [("a:other", 1), (POOL, 1)]
    text = succeed("slots", "status", IOSHAPE_COORDINATOR=address)
    assert "\n\ntest:shared (" in text


def test_status_of_a_path_is_that_of_its_filesystem(
    address: str, tmp_path: Path, write: Callable[..., Writer]
) -> None:
    writer = write("4711", pool=None, path=str(tmp_path / "model.pt"))
    assert writer.hear() == "holds"
    for path in (tmp_path, tmp_path / "another.pt"):
        text = succeed("slots", "status", "--path", path, "--json", "--coordinator", address)
        (found,) = json.loads(text)
        assert [one["job"] for one in found["holders"]] == ["4711"]
    sentence = fail(2, "slots", "status", POOL, "--path", tmp_path, "--coordinator", address)
    assert "not both" in sentence


def test_without_pools_there_is_nothing_to_show(address: str) -> None:
    done = call("slots", "status", "--coordinator", address)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("no pools")
    assert json.loads(succeed("slots", "status", "--json", "--coordinator", address)) == []


@pytest.mark.usefixtures("busy")
def test_a_pool_that_does_not_exist_is_not_made_by_asking(address: str) -> None:
    for arguments in (
        ["slots", "status", "test:shred"],
        ["slots", "clear", "test:shred"],
        ["slots", "kick", "test:shred", "0123456789abcdef-1"],
        ["top", "test:shred"],
    ):
        assert f'did you mean "{POOL}"?' in fail(1, *arguments, "--coordinator", address)
    pools = json.loads(succeed("slots", "status", "--json", "--coordinator", address))
    assert [one["pool"] for one in pools] == [POOL]


# ---- set, clear, kick ----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_set_changes_what_is_named_and_nothing_else(address: str) -> None:
    at = ("--coordinator", address)
    succeed("slots", "set", POOL, "--capacity", "7", *at)
    succeed("slots", "set", POOL, "--rate", "2G", "--small", "1M", *at)
    succeed("slots", "set", POOL, "--job-rate", "500M", "--bypass", "3", *at)
    found = state(address)
    names = (
        "capacity",
        "pool_bytes_per_s",
        "job_bytes_per_s",
        "small_bytes",
        "bypass",
        "capacity_by",
    )
    assert [found[name] for name in names] == [7, 2 << 30, 500 << 20, 1 << 20, 3, "operator"]
    assert abs(found["changed_s"] - time.time()) < 600
    out = succeed("slots", "clear", POOL, *at)
    assert "capacity: set by the operator" not in out
    assert "bandwidth: unlimited for the pool, unlimited for each job" in out


@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_a_pool_can_be_set_before_it_is_used(address: str) -> None:
    at = ("--coordinator", address)
    out = succeed("slots", "set", POOL, "--capacity", "7", *at)
    assert "saves of up to 16.0 MiB bypass the queue, 1 at a time" in out
    succeed("slots", "set", "lustre:project", "--capacity", "4", *at)
    assert (state(address)["capacity"], state(address, "lustre:project")["capacity"]) == (7, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", POOL],
        ["set", POOL, "--capacity", "0"],
        ["set", POOL, "--rate", "much"],
        ["set", POOL, "--rate", "0"],
        ["set", POOL, "--rate", "9999999T"],
        ["set", POOL, "--job-rate", "-1"],
        ["set", "--capacity", "3"],
        ["set", "redis://host", "--capacity", "3"],
        ["kick", POOL],
        [],
        ["frobnicate"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    fail(2, "slots", *arguments)


@pytest.mark.parametrize("address", ["redis"], indirect=True)
@pytest.mark.slow
def test_kicking_gives_the_slot_to_the_next(address: str, busy: tuple[Writer, Writer]) -> None:
    holder, waiter = busy
    holder.tell("lost")
    assert holder.hear() == "False"
    member = state(address)["holders"][0]["id"]
    at = ("--coordinator", address)
    fail(2, "slots", "kick", POOL, member, *at)
    assert state(address)["holders"][0]["id"] == member
    out = succeed("slots", "kick", POOL, member, "--yes", *at)
    assert out.startswith(f"{member}: revoked")
    assert waiter.hear() == "holds"

    def lost() -> bool:
        holder.tell("lost")
        return holder.hear() == "True"

    await_true(lost, "the loss")
    fail(1, "slots", "kick", POOL, member, "--yes", *at)


@pytest.mark.parametrize("address", ["redis"], indirect=True)
@pytest.mark.parametrize("answer", ["y", "n"])
def test_kick_asks_first(address: str, busy: tuple[Writer, Writer], answer: str) -> None:
    member = state(address)["holders"][0]["id"]
    with terminal("slots", "kick", POOL, member, "--coordinator", address) as one:
        one.await_text("[y/N]")
        assert f"Revoke {member} in {POOL}?" in one.seen
        one.type(f"{answer}\r")
        assert one.end() == (0 if answer == "y" else 1)
    if answer == "y":
        assert busy[1].hear() == "holds"
    else:
        assert state(address)["holders"][0]["id"] == member


@pytest.mark.slow
@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_a_waiter_that_is_kicked_asks_again_and_comes_last(
    address: str, busy: tuple[Writer, Writer], write: Callable[..., Writer]
) -> None:
    last = write("train", rank=9, nbytes=1 << 30)
    assert last.hear() == "waits"
    operator = Operator(address)
    await_true(lambda: operator.status(POOL).waiter_count == 2, "two that wait")
    first = state(address)["waiters"][0]
    assert first["rank"] == 3
    out = succeed("slots", "kick", POOL, first["id"], "--yes", "--coordinator", address)
    assert out.startswith(f"{first['id']}: revoked")
    await_true(lambda: operator.status(POOL).waiter_count == 2, "two again")
    found = state(address)
    assert [one["rank"] for one in found["waiters"]] == [9, 3]
    assert found["used"] == 1
    busy[0].tell("release")
    assert last.hear() == "holds"


@pytest.mark.parametrize("address", ["local"], indirect=True)
def test_on_one_host_an_operator_changes_nothing(address: str, busy: tuple[Writer, Writer]) -> None:
    at = ("--coordinator", address)
    for setting in (["--capacity", "7"], ["--rate", "2G"], ["--job", "4711", "--share", "2"]):
        assert "Redis" in fail(1, "slots", "set", POOL, *setting, *at)
    assert "Redis" in fail(1, "slots", "clear", POOL, *at)
    found = state(address)
    assert found["capacity"] == 1
    # The kernel keeps the slot for its process, and the table shows the process id.
    member = found["holders"][0]["id"]
    fail(1, "slots", "kick", POOL, member, "--yes", *at)
    (line,) = [
        line
        for line in succeed("slots", "status", POOL, *at).splitlines()
        if line.startswith("holds")
    ]
    assert line.split()[-2:] == [str(busy[0].process.pid), member]
    busy[0].process.kill()
    assert busy[1].hear() == "holds"


@pytest.mark.parametrize("address", ["local"], indirect=True)
def test_the_exporter_serves_pools_of_one_host(address: str, busy: tuple[Writer, Writer]) -> None:
    assert busy
    with exporter(IOSHAPE_COORDINATOR=address) as one:
        found = one.scrape()
    pool = f'{{pool="{POOL}"}}'
    assert found["ioshape_up"] == 1
    assert found[f"ioshape_pool_capacity_slots{pool}"] == 1
    assert found[f"ioshape_pool_holders{pool}"] == 1
    assert found[f"ioshape_pool_waiters{pool}"] == 1


# ---- Coordinators that do not answer -------------------------------------------------------------

COMMANDS = [
    ["slots", "status"],
    ["slots", "status", POOL],
    ["slots", "set", POOL, "--capacity", "3"],
    ["slots", "clear", POOL],
    ["slots", "kick", POOL, "0123456789abcdef-1", "--yes"],
    ["top"],
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_coordinator_out_of_reach_has_an_exit_code_of_its_own(
    arguments: list[str], tmp_path: Path
) -> None:
    address = f"unix://{tmp_path}/none.sock"
    fail(3, *arguments, "--coordinator", address)


@pytest.mark.wording
def test_a_coordinator_out_of_reach_is_named(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/none.sock"
    assert "none.sock" in fail(3, "slots", "status", "--coordinator", address)


@pytest.mark.parametrize("arguments", [*COMMANDS, ["exporter"]])
def test_without_coordination_there_are_no_pools(arguments: list[str]) -> None:
    fail(1, *arguments, IOSHAPE_COORDINATOR="open")


# ---- top -----------------------------------------------------------------------------------------


def member(one_id: str, passed: int, since_s: float, job: str = "j") -> Member:
    return Member(one_id, job, "n", 0, 1, False, False, 0, passed, 1, since_s, 10.0)


def pool_of(*holders: Member, waiters: tuple[Member, ...] = ()) -> PoolStatus:
    counts = len(holders), len(waiters)
    return PoolStatus(
        "p", "local", 4, "job", len(holders), 0, 0, 0, 1, 9, holders, waiters, *counts
    )


def test_the_exporter_counts_those_that_are_not_listed() -> None:
    class Crowded(Operator):
        def names(self) -> list[str]:
            return ["p"]

        def status(self, pool: str) -> PoolStatus:
            return replace(pool_of(member("a", 0, 1.0)), pool=pool, holder_count=300)

    families = PoolCollector(Crowded("local")).collect()
    (found,) = (one for one in families if one.name == "ioshape_pool_holders")
    assert [sample.value for sample in found.samples] == [300]


def test_rates_are_those_between_two_signs_of_life() -> None:
    rates = Rates()
    assert rates.sample([pool_of(member("a", 500, 10.0))], 100.0) == {"a": 50.0}
    # Without news the rate stays; after a long time without news it falls.
    assert rates.sample([pool_of(member("a", 500, 11.0))], 101.0) == {"a": 50.0}
    assert rates.sample([pool_of(member("a", 500, 30.0))], 120.0) == {"a": 25.0}
    assert rates.sample([pool_of(member("a", 700, 35.0))], 125.0) == {"a": 200 / 25}
    two = [pool_of(member("a", 900, 36.0)), pool_of(member("b", 0, 0.0))]
    assert rates.sample(two, 126.0) == {"a": 200.0, "b": 0.0}
    assert rates.sample([], 127.0) == {}
    assert rates.sample([pool_of(member("a", 900, 38.0))], 128.0) == {"a": 900 / 38}


@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_saves_that_end_before_a_heartbeat_count_in_the_rate_of_their_pool(
    address: str, write: Callable[..., Writer]
) -> None:
    def write_once() -> None:
        writer = write("short", nbytes=1 << 20)
        while writer.hear() != "holds":
            pass
        writer.tell("pace 1000000")
        writer.tell("release")
        assert writer.hear() == "released"

    operator, rates = Operator(address), PoolRates()
    write_once()
    assert rates.sample([operator.status(POOL)], 100.0) == {POOL: 0.0}
    write_once()
    assert rates.sample([operator.status(POOL)], 102.0) == {POOL: 500_000.0}
    write_once()
    assert rates.sample([operator.status(POOL)], 104.0) == {POOL: 500_000.0}
    assert rates.sample([operator.status(POOL)], 114.0) == {POOL: 0.0}


def looks(address: str, count: int) -> list[str]:
    """Return the first lines that `ioshape top` prints in a pipe, before Ctrl-C ends it."""
    process = subprocess.Popen(
        [IOSHAPE, "top", "--interval", "0.1", "--coordinator", address],
        env=environment(TERM="xterm"),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(  # noqa: PLW1509
            signal.SIGINT, signal.default_int_handler
        ),
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(count)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert "\x1b" not in "".join(lines) + rest
    return lines


@pytest.mark.usefixtures("busy")
def test_top_in_a_pipe_prints_each_look(address: str) -> None:
    lines = looks(address, 10)
    assert sum(line.startswith(POOL) for line in lines) == 2
    text = "".join(lines)
    assert re.search(rf"^holds +4711 +{re.escape(node())} +7 .*/s ", text, re.MULTILINE)
    assert re.search(rf"^waits +train +{re.escape(node())} +3 ", text, re.MULTILINE)


ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("how", ["q", "\x03", "SIGTERM"])
@pytest.mark.slow
def test_top_leaves_the_terminal_as_it_was(address: str, how: str) -> None:
    with terminal("top", "--interval", "0.2", "--coordinator", address) as one:
        one.await_text("train")
        assert "4711" in one.seen
        assert one.seen.count(ALTERNATE) == 1
        assert NORMAL not in one.seen
        seen = one.seen.count(POOL)
        await_true(lambda: one._read() and one.seen.count(POOL) > seen + 2, "more looks")
        if how == "SIGTERM":
            one.process.terminate()
        else:
            one.type(how)
        assert one.end() == (143 if how == "SIGTERM" else 0)
        assert one.seen.count(NORMAL) == 1
        # The cursor is visible again.
        assert one.seen.rfind("\x1b[?25h") > one.seen.rfind("\x1b[?25l")
        assert termios.tcgetattr(one.terminal)[:4] == one.before[:4]


# Idle before top looks, and sorted by name before the busy pool.
IDLE = """
import ioshape

slots = [ioshape.slot(pool=f"a:idle-{i:02}") for i in range(12)]
for slot in slots:
    slot.release()
print("released", flush=True)
input()
"""


@pytest.mark.usefixtures("busy")
@pytest.mark.slow
def test_top_shows_what_goes_on_and_whole_ids_in_a_small_window(
    address: str, tmp_path: Path
) -> None:
    ids = [one["id"] for one in [*state(address)["holders"], *state(address)["waiters"]]]
    with (
        started_program(tmp_path, IDLE, variables={"IOSHAPE_COORDINATOR": address}) as idle,
        terminal("top", "--coordinator", address, width=80, height=24) as one,
    ):
        idle.expect("released")
        one.await_text("idle: ")
        one.type("q")
        assert one.end() == 0
    shown = next(text for text in one.seen.split("\x1b[H") if "idle: " in text)
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()
    assert max(map(len, screen)) <= 80
    rows = [line.split() for line in screen if line.startswith(("holds", "waits"))]
    assert [row[0] for row in rows] == ["holds", "waits"]
    assert [row[-1] for row in rows] == ids
    assert looks(address, 1)[0].startswith(f"{POOL} (")


def test_a_table_gives_up_columns_before_it_cuts_and_never_ids() -> None:
    one = member("9f86d081884c7d65-3", 10**9, 1000.0, job="a-job-with-a-very-long-name")
    table = table_of([one], [one], {one.id: 1e9})
    for width in (200, 120, 80, 60):
        lines = list(table.fitted(width).lines())
        assert max(map(len, lines)) <= width
        assert all(line.endswith(one.id) for line in lines[1:])
    assert "node" not in lines[0]


@pytest.mark.wording
def test_top_goes_on_when_the_coordinator_does_not() -> None:
    with running_redis() as redis, writers() as make:
        asked = json.dumps({"pool": POOL})
        holder = make(redis.address, asked, job="4711", IOSHAPE_SLOTS="1")
        # A new server admits no writer for a grace period.
        assert holder.hear() in ("holds", "waits")
        with terminal("top", "--interval", "0.2", "--coordinator", redis.address) as one:
            one.await_text("4711")
            assert "redis.sock" not in one.seen
            redis.kill()
            one.await_text("redis.sock")
            redis.start()
            one.seen = ""
            one.await_text("ioshape top")
            one.type("q")
            assert one.end() == 0


# ---- exporter ------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_the_exporter_serves_what_status_shows(address: str, busy: tuple[Writer, Writer]) -> None:
    with exporter(IOSHAPE_COORDINATOR=address) as one:
        found = one.scrape()
        pool = f'{{pool="{POOL}"}}'
        assert found["ioshape_up"] == 1
        assert found[f"ioshape_pool_capacity_slots{pool}"] == 1
        assert found[f"ioshape_pool_used_slots{pool}"] == 1
        assert found[f"ioshape_pool_holders{pool}"] == 1
        assert found[f"ioshape_pool_waiters{pool}"] == 1
        assert found[f"ioshape_pool_grants_total{pool}"] == 1
        assert found[f"ioshape_pool_oldest_slot_seconds{pool}"] > 0
        assert found[f"ioshape_pool_oldest_wait_seconds{pool}"] > 0
        busy[0].tell("release")
        assert busy[1].hear() == "holds"

        def granted() -> bool:
            now = one.scrape()
            return (
                now[f"ioshape_pool_grants_total{pool}"] == 2
                and f"ioshape_job_written_bytes_total{writer}" in now
            )

        user = os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid{os.geteuid()}"
        writer = f'{{job="4711",pool="{POOL}",user="{user}"}}'

        await_true(granted, "the next grant")
        one.process.terminate()
        assert one.process.wait(TIMEOUT_S) == 0


SICK = """
import ioshape
import torch

state = {"w": torch.arange(1e5), "b": torch.arange(1e5)}
for step in range(3):
    state["w"] += 1
    if step == 1:
        state["b"][7] = float("nan")
    if step == 2:
        state["w"].zero_()
    ioshape.save(state, f"model-{step}.pt", durable=False)
"""


SICK_RANK = """
from group_program import *

for step in range(2):
    state = {"w": torch.arange(1e5) + rank + step}
    if step == 1 and rank == 1:
        state["w"][7] = float("nan")
    ioshape.save_group(state, "run", step, mode="node")
"""


@pytest.mark.slow
def test_the_exporter_counts_alarms_by_rule(tmp_path: Path) -> None:
    """Also count a rank whose shard another process writes."""
    with running_redis() as redis:
        at = {"IOSHAPE_COORDINATOR": redis.address}
        run_program(tmp_path, SICK, variables={"IOSHAPE_JOB": "alone", **at})
        run_ranks(tmp_path, SICK_RANK, IOSHAPE_JOB="ranks", **at)
        with exporter(**at) as one:
            found = one.scrape()
    labels = re.compile(r'ioshape_job_alarms_total\{job="(\w+)",.*rule="(\w+)",.*\}')
    matches = {name: labels.fullmatch(name) for name in found}
    counted = {match.groups(): found[name] for name, match in matches.items() if match}
    none = {"nonfinite": 0, "unchanged": 0, "constant": 0, "jump": 0}
    # The NaN stays until it is repaired.
    expected = {"alone": none | {"nonfinite": 2, "constant": 1}, "ranks": none | {"nonfinite": 1}}
    assert counted == {
        (job, rule): number for job, rules in expected.items() for rule, number in rules.items()
    }


def test_the_exporter_says_that_the_coordinator_is_away_and_back() -> None:
    with running_redis() as redis, exporter(IOSHAPE_COORDINATOR=redis.address) as one:
        assert one.scrape()["ioshape_up"] == 1
        redis.kill()
        await_true(lambda: one.scrape()["ioshape_up"] == 0, "the outage")
        redis.start()
        await_true(lambda: one.scrape()["ioshape_up"] == 1, "the return")


def test_the_exporter_begins_while_the_coordinator_is_away(tmp_path: Path) -> None:
    with exporter(IOSHAPE_COORDINATOR=f"unix://{tmp_path}/none.sock") as one:
        assert one.scrape()["ioshape_up"] == 0


def test_the_exporter_serves_what_waits_on_a_tier(tmp_path: Path) -> None:
    labels = f'{{tier="{tmp_path}/fast",user="{pwd.getpwuid(os.geteuid()).pw_name}"}}'
    with saver(tmp_path) as saves, exporter("--tier", saves.fast) as one:
        saves.save("a.pt", b"12345")
        saves.save("a.pt", b"123456")
        saves.save_group(1)
        with undrained(saves.fast):
            found = one.scrape()
        assert found[f"ioshape_tier_waiting{labels}"] == 2
        assert found[f"ioshape_tier_waiting_bytes{labels}"] >= 6 + 5
        assert found[f"ioshape_tier_oldest_wait_seconds{labels}"] > 0
        assert found[f"ioshape_tier_draining{labels}"] == 1
        assert found[f"ioshape_tier_drained_timestamp_seconds{labels}"] == 0
        assert "ioshape_up" not in found
        began = time.time()
        saves.tier.drain()
        found = one.scrape()
        assert found[f"ioshape_tier_waiting{labels}"] == 0
        assert found[f"ioshape_tier_waiting_bytes{labels}"] == 0
        assert found[f"ioshape_tier_oldest_wait_seconds{labels}"] == 0
        assert found[f"ioshape_tier_draining{labels}"] == 0
        # The kernel's clock has coarse ticks.
        assert found[f"ioshape_tier_drained_timestamp_seconds{labels}"] > began - 1
        saves.fast.rename(tmp_path / "away")
        found = one.scrape()
        assert found[f'ioshape_tier_up{{tier="{saves.fast}"}}'] == 0
        assert not any("waiting" in name for name in found)
        (tmp_path / "away").rename(saves.fast)


@pytest.mark.parametrize("address", ["redis"], indirect=True)
def test_the_documented_metrics_are_those_that_are_served(
    address: str, busy: tuple[Writer, Writer], tmp_path: Path
) -> None:
    assert busy
    page = (ROOT / "docs" / "coordinator.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(ioshape_\w+)` \|", page, re.MULTILINE))
    with exporter(IOSHAPE_COORDINATOR=address) as one:
        served = {name.partition("{")[0] for name in one.scrape()}
    with saver(tmp_path) as saves, exporter("--tier", saves.fast) as one:
        served |= {name.partition("{")[0] for name in one.scrape()}
    assert served == documented
    for file in ("prometheus/rules.yml", "prometheus/rules_test.yml", "grafana/ioshape.json"):
        text = (ROOT / "examples" / "deploy" / file).read_text(encoding="utf-8")
        used = set(re.findall(r"\bioshape_\w+", text))
        assert used
        assert used <= served, file


def test_labels_of_jobs_are_bounded() -> None:
    class Crowded(Operator):
        def names(self) -> list[str]:
            return ["p"]

        def status(self, pool: str) -> PoolStatus:
            jobs = tuple(PoolJob(f"job{i}", "eve", 200 - i, 1) for i in range(200))
            return replace(pool_of(), pool=pool, jobs=jobs)

    families = PoolCollector(Crowded("local")).collect()
    (found,) = (one for one in families if one.name == "ioshape_job_written_bytes")
    assert len(found.samples) == _MOST_JOBS


def test_without_its_package_the_exporter_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None; sys.argv = ['ioshape', 'exporter']\n"
        "from ioshape._cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'ioshape[exporter]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "addresses"),
    [
        (["slots", "status"], (("redis://127.0.0.1:1", 1), ("local", 0))),
        (["top"], (("redis://127.0.0.1:1", 1),)),
    ],
)
def test_without_its_package_a_redis_is_not_asked_and_the_sentence_says_what_to_install(
    arguments: list[str], addresses: tuple[tuple[str, int], ...]
) -> None:
    code = (
        f"import sys; sys.modules['redis'] = None; sys.argv = ['ioshape', *{arguments}]\n"
        "from ioshape._cli import main; main()"
    )
    for address, expected in addresses:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(IOSHAPE_COORDINATOR=address),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expected
        assert ("pip install 'ioshape[redis]'" in done.stderr) == bool(expected)


def test_a_port_that_is_taken_is_a_sentence(address: str) -> None:
    with exporter(IOSHAPE_COORDINATOR=address) as one:
        port = one.url.split(":")[2].split("/")[0]
        sentence = fail(1, "exporter", "--port", port, IOSHAPE_COORDINATOR=address)
    assert port in sentence


# ---- Secrets -------------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> Iterator[Redis]:
    with running_redis(password=SECRET) as redis:
        yield redis


def with_password(redis: Redis, password: str = SECRET) -> str:
    return f"redis://:{password}@127.0.0.1:{redis.port}"


ALL_COMMANDS = [
    *COMMANDS,
    ["slots", "status", "--json"],
    ["settings"],
    ["settings", "--json"],
    ["--debug", "slots", "status"],
]


@pytest.mark.parametrize("arguments", ALL_COMMANDS)
@pytest.mark.slow
def test_no_command_prints_a_password(guarded: Redis, tmp_path: Path, arguments: list[str]) -> None:
    """Check right and wrong passwords, and addresses that cannot be used."""
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    dead = Redis(tmp_path)
    for variables in (
        {"IOSHAPE_COORDINATOR": with_password(guarded)},
        {"IOSHAPE_COORDINATOR": guarded.address, "IOSHAPE_PASSWORD": SECRET},
        {"IOSHAPE_COORDINATOR": guarded.address, "IOSHAPE_PASSWORD_FILE": str(file)},
        {"IOSHAPE_COORDINATOR": with_password(guarded, f"wrong-{SECRET}")},
        {"IOSHAPE_COORDINATOR": f"redis://nobody:{SECRET}@127.0.0.1:{guarded.port}"},
        {"IOSHAPE_COORDINATOR": with_password(dead)},
        {"IOSHAPE_COORDINATOR": f"redis://:{SECRET}@host:port"},
        {"IOSHAPE_COORDINATOR": f"radis://:{SECRET}@host"},
        {"IOSHAPE_COORDINATOR": f"redis://:{SECRET}@"},
    ):
        # With the right password "top" goes on until it is ended.
        prefix = ["timeout", "2"] if arguments == ["top"] else []
        done = command.call(*arguments, prefix=prefix, env=variables)
        assert done.returncode in (0, 1, 2, 3, *([124] if prefix else []))
        assert SECRET not in done.stdout + done.stderr


def test_the_right_password_lets_commands_in(guarded: Redis) -> None:
    known = {"IOSHAPE_COORDINATOR": guarded.address, "IOSHAPE_PASSWORD": SECRET}
    succeed("slots", "set", POOL, "--capacity", "3", **known)
    assert POOL in succeed("slots", "status", POOL, IOSHAPE_COORDINATOR=with_password(guarded))
    assert call("slots", "status", IOSHAPE_COORDINATOR=guarded.address).returncode == 3


@pytest.mark.parametrize(
    "arguments",
    [["slots", "status"], ["slots", "set", POOL, "--capacity", "3"], ["top"], ["exporter"]],
)
def test_a_password_in_an_argument_is_refused_unsaid(arguments: list[str]) -> None:
    address = f"redis://user:{SECRET}@host"
    sentence = fail(2, *arguments, "--coordinator", address)
    assert SECRET not in sentence
    assert "IOSHAPE_PASSWORD_FILE" in sentence
    done = call(*arguments, address)
    assert done.returncode == 2
    assert SECRET not in done.stdout + done.stderr


def test_ps_shows_no_password(guarded: Redis) -> None:
    with exporter(IOSHAPE_COORDINATOR=with_password(guarded)) as one:
        assert one.scrape()["ioshape_up"] == 1
        shown = [
            path.read_bytes()
            for path in (Path(f"/proc/{one.process.pid}") / name for name in ("cmdline", "comm"))
        ]
        assert SECRET.encode() not in b"".join(shown)


# ---- The documented configuration ----------------------------------------------------------------


@pytest.mark.slow
def test_redis_takes_the_documented_configuration() -> None:
    """Check the documented files with a few settings of this machine, and the user of users.acl."""
    folder = ROOT / "docs" / "coordinator"
    users = (folder / "users.acl").read_text(encoding="utf-8")
    password = re.findall(r"^user ioshape .*>(\S+)", users, re.MULTILINE)[0]
    with short_folder() as place, writers() as make:
        port = str(Redis(place).port)
        own = ["--port", port, "--dir", place, "--aclfile", folder / "users.acl"]
        server = subprocess.Popen(
            [program("redis-server"), str(folder / "redis.conf"), *map(str, own)],
            stdout=subprocess.DEVNULL,
        )
        try:
            address = f"redis://ioshape@127.0.0.1:{port}"
            known = {"IOSHAPE_COORDINATOR": address, "IOSHAPE_PASSWORD": password}
            await_true(
                lambda: call("slots", "status", **known).returncode == 0,
                "redis-server",
            )
            # The server refuses clients without the password.
            assert call("slots", "status", "--coordinator", address).returncode == 3
            succeed("slots", "set", POOL, "--capacity", "2", **known)
            writer = make(address, json.dumps({"pool": POOL}), IOSHAPE_PASSWORD=password)
            while writer.hear() != "holds":
                pass
            (found,) = json.loads(succeed("slots", "status", "--json", **known))
            assert (found["pool"], found["capacity"], found["used"]) == (POOL, 2, 1)
        finally:
            server.terminate()
            server.wait(TIMEOUT_S)
