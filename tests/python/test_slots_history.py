# SPDX-License-Identifier: Apache-2.0
"""Who used a pool, and what one job or user may: the commands, with a real Redis."""

import json
import time
from collections.abc import Callable, Iterator

import pytest
from command import call, succeed
from coordinators import Writer, coordinator, writers
from ioshape._slots.pools import Operator
from ioshape.cli.slots.exporter import PoolCollector

POOL = "test:history"
MIB = 1 << 20

Use = Callable[..., None]


@pytest.fixture
def address() -> Iterator[str]:
    with coordinator("redis") as value:
        yield value


@pytest.fixture
def use(address: str) -> Iterator[Use]:
    """A process writes so many MiB in a slot, and ends."""
    with writers() as make:

        def used(job: str, mib: int, **variables: str) -> None:
            asked = json.dumps({"pool": POOL})
            writer: Writer = make(address, asked, job=job, IOSHAPE_SLOTS="1", **variables)
            assert writer.hear() == "holds"
            for line in (f"pace {mib * MIB}", "release"):
                writer.tell(line)
            assert writer.hear() == "released"

        yield used


def ioshape(address: str, *arguments: str) -> str:
    return succeed(call("slots", *arguments, "--coordinator", address))


def test_history_adds_up_jobs_users_and_hours(address: str, use: Use) -> None:
    began = time.time()
    use("7", 3, USER="ann")
    use("8", 2, USER="ann")
    use("8", 2, USER="ann")
    use("9", 1, USER="bob")
    ioshape(address, "set", POOL, "--capacity", "3")
    found = json.loads(ioshape(address, "history", POOL, "--json"))
    # It may be that an hour ended meanwhile.
    totals: dict[tuple[str, str], list[float]] = {}
    for row in found["hours"]:
        assert began - 3600 < row["begin_s"] <= time.time()
        total = totals.setdefault((row["job"], row["user"]), [0, 0])
        total[0] += row["written_bytes"]
        total[1] += row["writes"]
        assert row["held_s"] >= 0
        assert row["waited_s"] >= 0
    assert totals[("7", "ann")] == [3 * MIB, 1]
    assert totals[("8", "ann")] == [4 * MIB, 2]
    assert len(totals) == 3
    assert [act["what"] for act in found["acts"]] == ["set capacity=3"]
    table = ioshape(address, "history", POOL)
    first, second, *_ = (line.split() for line in table.splitlines()[1:])
    assert first[:3] == ["8", "ann", "4.00"]
    assert second[:3] == ["7", "ann", "3.00"]
    users = ioshape(address, "history", POOL, "--by", "user", "--since", "2h").splitlines()
    assert [line.split()[:2] for line in users[1:3]] == [["ann", "7.00"], ["bob", "1.00"]]
    hours = ioshape(address, "history", POOL, "--by", "hour", "--since", "30d").splitlines()
    assert hours[1].startswith(time.strftime("%Y-%m-%d", time.localtime(began)))


def test_waiting_counts_for_who_waits(address: str) -> None:
    with writers() as make:
        asked = json.dumps({"pool": POOL})
        first = make(address, asked, job="first", IOSHAPE_SLOTS="1")
        assert first.hear() == "holds"
        second = make(address, asked, job="second", IOSHAPE_SLOTS="1")
        assert second.hear() == "waits"
        time.sleep(0.2)
        first.tell("release")
        assert second.hear() == "holds"
        second.tell("release")
        assert second.hear() == "released"
    status = Operator(address).status(POOL)
    waited = {job.job: job.waited_s for job in status.jobs}
    assert waited["first"] == 0
    assert waited["second"] >= 0.2
    assert status.waited_s == waited["second"]
    held = {job.job: job.held_s for job in status.jobs}
    assert held["first"] >= waited["second"]
    # What Prometheus is told is the same.
    told = {
        (sample.name, sample.labels.get("job", "")): sample.value
        for family in PoolCollector(Operator(address)).collect()
        for sample in family.samples
        if sample.labels.get("pool") == POOL
    }
    assert told["ioshape_job_waited_seconds_total", "second"] == waited["second"]
    assert told["ioshape_job_held_seconds_total", "first"] == held["first"]
    assert told["ioshape_pool_waited_seconds_total", ""] == waited["second"]
    assert told["ioshape_pool_held_seconds_total", ""] == status.held_s


def test_a_limit_of_one_job_holds_against_what_it_asks_for(address: str, use: Use) -> None:
    out = ioshape(address, "set", POOL, "--job", "7", "--share", "0.5", "--rate", "1M")
    assert "limit of job 7: share 0.5, 1.00 MiB/s\n" in out
    out = ioshape(address, "set", POOL, "--user", "ann", "--share", "2")
    assert "limit of user ann: share 2\n" in out
    began = time.monotonic()
    # 250 ms of it come at once.
    use("7", 2, IOSHAPE_RATE="1G", IOSHAPE_SHARE="1000")
    assert time.monotonic() - began > 1.7
    limits = Operator(address).status(POOL).limits
    assert [(one.job, one.user, one.share, one.bytes_per_s) for one in limits] == [
        ("7", "", 50, MIB),
        ("", "ann", 200, 0),
    ]
    ioshape(address, "clear", POOL, "--job", "7")
    acts = [act.what for act in Operator(address).status(POOL).acts]
    assert acts == [
        f"set job 7 share=50 rate={MIB}",
        "set user ann share=200 rate=0",
        "clear job 7",
    ]
    # What was set for the pool goes alone, too.
    assert "limit of user ann: share 2\n" in ioshape(address, "clear", POOL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", POOL, "--share", "0.5"],
        ["set", POOL, "--job", "1"],
        ["set", POOL, "--job", "1", "--user", "ann", "--share", "1"],
        ["set", POOL, "--job", "1", "--capacity", "3"],
        ["history", POOL, "--since", "3w"],
        ["history", POOL, "--since", "31d"],
        ["history"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert call("slots", *arguments).returncode == 2


@pytest.mark.parametrize(
    "arguments", [["history", POOL], ["set", POOL, "--user", "ann", "--rate", "1G"]]
)
def test_one_host_keeps_neither_history_nor_limits(arguments: list[str]) -> None:
    with coordinator("local") as address:
        at = ("--coordinator", address)
        succeed(call("slots", "set", POOL, "--capacity", "2", *at))
        done = call("slots", *arguments, *at)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
