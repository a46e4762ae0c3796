# SPDX-License-Identifier: Apache-2.0
"""Damage that one user does to a pool or to the exporter does not hide other pools."""

import fcntl
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ioshape
import pytest
from checkpoints import left_clean
from command import IOSHAPE, call, fail, succeed
from coordinators import TIMEOUT_S, Connection, await_true, coordinator, writers
from exporters import exporter
from ioshape._core import context
from ioshape._slots.pools import MOST_POOLS, Operator
from tree import program

GOOD, BROKEN = "zzz", "aaa"


@pytest.fixture
def address() -> Iterator[str]:
    """Yield the address of a Redis with a pool that a writer uses, and another pool."""
    with coordinator("redis") as value, writers() as make:
        assert make(value, json.dumps({"pool": GOOD})).hear() == "holds"
        Operator(value).set(BROKEN, capacity=3)
        yield value


def connected(address: str) -> Connection:
    path, _, database = address.removeprefix("unix://").partition("?db=")
    connection = Connection(Path(path))
    connection.call("SELECT", database)
    return connection


@contextmanager
def broken(address: str) -> Iterator[None]:
    """Deny access to the keys of all pools but GOOD during the block."""
    rights = connected(address)
    rights.call("ACL", "SETUSER", "default", "resetkeys", f"~{{ios:{GOOD}}}:*")
    yield
    rights.call("ACL", "SETUSER", "default", "allkeys")


def test_a_pool_that_cannot_be_read_hides_no_other_from_the_exporter(address: str) -> None:
    def up(found: dict[str, float]) -> dict[str, float]:
        values = {pool: found[f'ioshape_pool_up{{pool="{pool}"}}'] for pool in (BROKEN, GOOD)}
        return {**values, "": found["ioshape_up"]}

    with exporter(IOSHAPE_COORDINATOR=address) as one:
        assert up(one.scrape()) == {BROKEN: 1, GOOD: 1, "": 1}
        with broken(address):
            found = one.scrape_anew()
            assert up(found) == {BROKEN: 0, GOOD: 1, "": 1}
            assert found[f'ioshape_pool_holders{{pool="{GOOD}"}}'] == 1
            assert f'ioshape_pool_holders{{pool="{BROKEN}"}}' not in found
        assert up(one.scrape_anew()) == {BROKEN: 1, GOOD: 1, "": 1}


def first_look(address: str) -> str:
    """Return what `ioshape top` prints until it has shown both pools."""
    words = [str(IOSHAPE), "top", "--coordinator", address]
    shown = ""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as top:
        late = threading.Timer(TIMEOUT_S, top.kill)
        late.start()
        assert top.stdout is not None
        for line in top.stdout:
            shown += line
            if GOOD in shown and BROKEN in shown:
                top.terminate()
        late.cancel()
    return shown


@pytest.mark.slow
def test_a_pool_that_cannot_be_read_is_a_line(address: str) -> None:
    words = ("slots", "status")
    with broken(address):
        text = succeed(call(*words, "--coordinator", address))
        found = json.loads(succeed(call(*words, "--json", "--coordinator", address)))
        alone = fail(call(*words, BROKEN, "--coordinator", address), 3)
        top = first_look(address)
    for shown in (text, top):
        assert f"{GOOD} (redis): 1 of 2 slots taken" in shown
        assert next(one for one in shown.splitlines() if one.startswith(f"{BROKEN}: ")) == alone
    assert {one["pool"]: set(one) == {"pool", "error"} for one in found} == {
        BROKEN: True,
        GOOD: False,
    }


def test_a_file_that_this_user_may_not_read_is_a_line() -> None:
    with coordinator("local") as address, writers() as make:
        for pool in (GOOD, BROKEN):
            assert make(address, json.dumps({"pool": pool})).hear() == "holds"
        folder = Path(address.removeprefix("local:"))
        (path,) = folder.glob(f"ioshape-{BROKEN}-*")
        path.chmod(0o222)
        less = []
        if os.geteuid() == 0:  # root may read all files, unless it loses that capability
            os.chown(path, 65534, 65534)
            less = [program("setpriv"), "--bounding-set=-dac_override,-dac_read_search"]
        for words, code in (([], 0), ([BROKEN], 3)):
            done = subprocess.run(
                [*less, IOSHAPE, "slots", "status", *words, "--coordinator", address],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == code, done.stderr
            assert (f"{GOOD} (local): " in done.stdout) == (not words)
            assert ("Permission denied" in done.stderr) == bool(words)


def test_locks_of_another_user_are_no_requests() -> None:
    with coordinator("local") as address, writers() as make:
        assert make(address, json.dumps({"pool": GOOD})).hear() == "holds"
        folder = Path(address.removeprefix("local:"))
        (path,) = folder.glob(f"ioshape-{GOOD}-*")
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 1 << 43, 2 << 40)
            status = Operator(address).status(GOOD)
    assert (status.used, status.holder_count, status.waiter_count) == (1, 1, 0)


@pytest.mark.parametrize("age_s", [3600, 100_000])
def test_the_file_of_a_pool_that_no_process_has_used_for_a_day_is_removed(age_s: int) -> None:
    with coordinator("local") as address:
        folder = Path(address.removeprefix("local:"))
        with writers() as make:
            holder = make(address, json.dumps({"pool": GOOD}))
            assert holder.hear() == "holds"
            (path,) = folder.glob(f"ioshape-{GOOD}-*")
            os.utime(path, (0, 0))
            assert Operator(address).names() == [GOOD]
            holder.process.kill()
            holder.process.wait()
        assert path.exists()
        then = time.time() - age_s
        os.utime(path, (then, then))
        assert Operator(address).names() == ([GOOD] if age_s == 3600 else [])
        assert path.exists() == (age_s == 3600)


def test_what_is_no_file_of_a_pool_is_no_pool() -> None:
    with coordinator("local") as address, writers() as make:
        assert make(address, json.dumps({"pool": GOOD})).hear() == "holds"
        folder = Path(address.removeprefix("local:"))
        (path,) = folder.glob(f"ioshape-{GOOD}-*")
        end = "0123456789abcdef.v5.slots"
        (folder / f"ioshape-copy-{end}").write_bytes(path.read_bytes())
        (folder / f"ioshape-link-{end}").symlink_to(path)
        (folder / f"ioshape-text-{end}").write_text("text")
        (folder / f"ioshape-folder-{end}").mkdir()
        os.mkfifo(folder / f"ioshape-pipe-{end}")
        assert Operator(address).names() == [GOOD]


@pytest.mark.slow
def test_more_pools_than_are_listed_are_counted() -> None:
    with coordinator("redis") as address:
        operator = Operator(address)
        for i in range(MOST_POOLS + 2):
            operator.set(f"pool-{i:03}", capacity=1)
        last = f"pool-{MOST_POOLS + 1:03}"
        words = ("slots", "status")
        text = succeed(call(*words, "--coordinator", address))
        assert text.count(" (redis): ") == MOST_POOLS
        assert text.endswith("... and 2 more pools; name the pools that you want to see\n")
        done = call(*words, "--json", "--coordinator", address)
        assert len(json.loads(done.stdout)) == MOST_POOLS
        assert "2 more pools" in done.stderr
        assert last in succeed(call(*words, last, "--coordinator", address))
        with exporter(IOSHAPE_COORDINATOR=address) as one:
            found = one.scrape()
            assert found["ioshape_pools_left_out"] == 2
            assert f'ioshape_pool_up{{pool="{last}"}}' not in found
        with exporter(last, IOSHAPE_COORDINATOR=address) as one:
            found = one.scrape()
            assert found["ioshape_pools_left_out"] == 0
            assert [name for name in found if "_up{" in name] == [
                f'ioshape_pool_up{{pool="{last}"}}'
            ]


def descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.long
def test_clients_that_ask_nothing_stop_no_scrape_and_do_not_stay(address: str) -> None:
    with exporter(IOSHAPE_COORDINATOR=address) as one, ExitStack() as stack:
        one.scrape()
        before = descriptors(one.process.pid)
        idle = [stack.enter_context(socket.create_connection(one.address)) for _ in range(128)]
        idle[0].sendall(b"GET /metrics HT")
        assert one.scrape()["ioshape_up"] == 1
        for connection in idle:
            connection.settimeout(60)
            assert connection.recv(1) == b""
        # The exporter's threads close the connections one after the other.
        await_true(lambda: descriptors(one.process.pid) - before <= 2, "its descriptors are closed")
        one.process.terminate()
        assert one.process.wait(TIMEOUT_S) == 0


# ---- Keys of a Redis that any client may write ---------------------------------------------------

GARBAGE = "\x00 no number"
#: key of the pool, field of the key ("": the whole key), and the data that survives
POISONS = {
    "all": ("m", "", "capacity limits changed"),
    "pool": ("m", "pool", "capacity limits changed"),
    "settings": ("o", "", ""),
    "setting": ("o", "capacity", "limits changed"),
    "limit": ("o", "job:4711:rate", "capacity limits changed"),
    "holders": ("h", "", "capacity limits changed"),
    "queue": ("q", "", "capacity limits changed"),
    "waiters": ("l", "", "capacity limits changed"),
    "jobs": ("j", "", "capacity limits changed"),
    "job": ("j", "mine", "capacity limits changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("poison", POISONS)
def test_keys_that_cannot_be_read_are_dropped_and_settings_kept(
    poison: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, field, survives = POISONS[poison]
    with coordinator("redis") as address, left_clean():
        monkeypatch.delenv("IOSHAPE_COORDINATOR")  # the variable would override configure()
        monkeypatch.setitem(context.test_options, "lease_ms", 1000)
        ioshape.configure(coordinator=address, job="mine", unreachable="fail")
        operator = Operator(address)
        operator.set(GOOD, capacity=3)
        operator.set(GOOD, job="4711", job_bytes_per_s=1 << 30)
        ioshape.slot(pool=GOOD).release()
        held = ioshape.slot(pool=GOOD)
        connection = connected(address)
        name = f"{{ios:{GOOD}}}:v7:{key}"
        if field:
            connection.call("HSET", name, field, GARBAGE)
        else:
            connection.call("DEL", name)
            connection.call("SET", name, GARBAGE)
        # With unreachable=fail, a call that the coordinator refuses would raise.
        for _ in range(2):
            ioshape.slot(pool=GOOD, timeout=60).release()
        held.release()
        status = operator.status(GOOD)
        ioshape.slot(pool=GOOD, timeout=60).release()
        ioshape.configure(coordinator="open")
    assert ("capacity" in survives) == (status.capacity_by == "operator")
    assert ("limits" in survives) == bool(status.limits)
    assert ("changed" in survives) == (status.changed_s > 0)
    said = [one.getMessage() for one in caplog.records if "unreadable keys" in one.getMessage()]
    assert len(said) == 1 or (poison in ("waiters", "setting", "limit") and not said)


#: Writes garbage to the keys that wake the members of a pool.
POISON_WAKES = """
local all = redis.call('HGETALL', KEYS[1] .. 'm')
for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'm:' then
        local member = cmsgpack.unpack(all[i + 1])
        redis.call('SET', KEYS[1] .. 'w:' .. member.client, 'garbage')
    end
end
"""


@pytest.mark.slow
def test_a_key_that_wakes_a_waiter_and_cannot_be_written_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with coordinator("redis") as address, left_clean():
        monkeypatch.delenv("IOSHAPE_COORDINATOR")  # the variable would override configure()
        monkeypatch.setitem(context.test_options, "lease_ms", 1000)
        ioshape.configure(coordinator=address, unreachable="fail")
        operator = Operator(address)
        operator.set(GOOD, capacity=1)
        connection = connected(address)
        with ThreadPoolExecutor(1) as thread:
            for poison in (True, False):
                held = ioshape.slot(pool=GOOD)
                waits = thread.submit(lambda: ioshape.slot(pool=GOOD, timeout=60).release())
                await_true(lambda: operator.status(GOOD).waiter_count == 1, "a waiter")
                if poison:
                    connection.call("EVAL", POISON_WAKES, "1", f"{{ios:{GOOD}}}:v7:")
                held.release()
                waits.result(60)
        ioshape.configure(coordinator="open")
