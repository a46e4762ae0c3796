# SPDX-License-Identifier: Apache-2.0
"""Limits of jobs and users, and the usage of jobs: the commands with a real Redis."""

import json
import time
from collections.abc import Callable, Iterator

import pytest
from command import call, succeed
from coordinators import Writer, coordinator, writers
from ioshape._cli.exporter import PoolCollector
from ioshape._slots.pools import Operator

POOL = "test:limits"
MIB = 1 << 20

Use = Callable[..., None]


@pytest.fixture
def address() -> Iterator[str]:
    with coordinator("redis") as value:
        yield value


@pytest.fixture
def use(address: str) -> Iterator[Use]:
    """Yield a function that runs a process which writes so many MiB in a slot."""
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
    # Prometheus gets the same numbers.
    told = {
        (sample.name, sample.labels.get("job", "")): sample.value
        for family in PoolCollector(Operator(address)).collect()
        for sample in family.samples
        if sample.labels.get("pool") == POOL
    }
    assert told["ioshape_job_waited_seconds_total", "second"] == waited["second"]
    assert told["ioshape_pool_waited_seconds_total", ""] == waited["second"]
    assert told["ioshape_pool_held_seconds_total", ""] == status.held_s


def test_a_limit_of_one_job_holds_against_what_it_asks_for(address: str, use: Use) -> None:
    out = ioshape(address, "set", POOL, "--job", "7", "--share", "0.5", "--rate", "1M")
    assert "limit of job 7: share 0.5, 1.00 MiB/s\n" in out
    out = ioshape(address, "set", POOL, "--user", "ann", "--share", "2")
    assert "limit of user ann: share 2\n" in out
    began = time.monotonic()
    # The first 250 ms of the rate need no wait.
    use("7", 2, IOSHAPE_RATE="1G", IOSHAPE_SHARE="1000")
    assert time.monotonic() - began > 1.7
    limits = Operator(address).status(POOL).limits
    assert [(one.job, one.user, one.share, one.bytes_per_s) for one in limits] == [
        ("7", "", 50, MIB),
        ("", "ann", 200, 0),
    ]
    ioshape(address, "clear", POOL, "--job", "7")
    # The pool's own settings are cleared, and the limits stay.
    assert "limit of user ann: share 2\n" in ioshape(address, "clear", POOL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["set", POOL, "--share", "0.5"],
        ["set", POOL, "--job", "1"],
        ["set", POOL, "--job", "1", "--user", "ann", "--share", "1"],
        ["set", POOL, "--job", "1", "--capacity", "3"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert call("slots", *arguments).returncode == 2
