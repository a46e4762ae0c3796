# SPDX-License-Identifier: Apache-2.0
"""Checks that stripefs's times follow from its parameters, as a client sees them."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from striped import INSTANT, Mount, opened, striped

MIB = 1 << 20

#: largest relative error of a time
TOLERANCE = 0.1
#: number of tries, because other programs use the machine: the best one counts, and a good one ends
#: them
TRIES = 12


@dataclass(frozen=True)
class Check:
    """An expected and a measured time, in seconds of the model."""

    name: str
    expected_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.measured_s / self.expected_s - 1)

    @property
    def good(self) -> bool:
        return self.error <= TOLERANCE


class Client:
    """A client that sends direct requests of 1 MiB to one file, each from its own thread."""

    def __init__(self, path: Path, n_requests: int, buffer: mmap, threads: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, n_requests * MIB)  # else they wait for each other
        self._buffer = buffer
        self._threads = ThreadPoolExecutor(threads)

    def write(self, number: int) -> None:
        os.pwrite(self._file, self._buffer, number * MIB)

    def begin(self, number: int) -> "Future[None]":
        return self._threads.submit(self.write, number)

    def write_all(self, n_requests: int) -> None:
        list(self._threads.map(self.write, range(n_requests)))

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)


@contextmanager
def clients(mount: Mount, n_requests: int, threads: int, count: int = 1) -> Iterator[list[Client]]:
    """Make clients with a file each, on mounts of their own as far as there are enough."""
    with mmap(-1, MIB) as buffer:
        made = [
            Client(mount.paths[i % len(mount.paths)] / f"file-{i}", n_requests, buffer, threads)
            for i in range(count)
        ]
        try:
            yield made
        finally:
            for client in made:
                client.close()


def best(tries: Callable[[], list[Check]]) -> list[Check]:
    found = []
    for _ in range(TRIES):
        found.append(tries())
        if all(one.good for one in found[-1]):
            break
    return min(found, key=lambda checks: max(one.error for one in checks))


def check(name: str, slow: float, expected_s: float, run: Callable[[], object]) -> Check:
    """Check the duration of a function."""

    def run_once() -> list[Check]:
        begin = time.monotonic()
        run()
        return [Check(name, expected_s, (time.monotonic() - begin) / slow)]

    return best(run_once)[0]


def bandwidth(slow: float, targets: int, n_requests: int) -> Check:
    """Check the bandwidth of one target, or of several together. Requests are always queued."""
    parameters = {"targets": targets, "stripe_count": -1, "bandwidth": "64Mi", "seek_ms": 0}
    with (
        striped("hdd", slow=slow, **parameters, **INSTANT) as mount,
        clients(mount, n_requests, 4 * targets) as (client,),
    ):
        name = f"bandwidth of {targets}"
        return check(name, slow, n_requests / targets / 64, lambda: client.write_all(n_requests))


def seek(slow: float, n_requests: int) -> Check:
    """Check seeks: two files in turn on one target, one request at a time."""
    parameters = {"targets": 1, "bandwidth": "1Gi", "seek_ms": 8}
    with (
        striped("hdd", slow=slow, **parameters, **INSTANT) as mount,
        clients(mount, n_requests, 1, count=2) as files,
    ):

        def run() -> None:
            for number in range(n_requests):
                files[number % 2].write(number)

        return check("seek", slow, n_requests * (0.008 + 1 / 1024), run)


def latency(slow: float, n_requests: int) -> Check:
    """Check the latency of sequential requests, which is added to the target's time."""
    parameters = {"targets": 1, "bandwidth": "1Gi", "seek_ms": 0, "latency_ms": 5}
    with (
        striped("ssd", slow=slow, **parameters, **INSTANT) as mount,
        clients(mount, n_requests, 1) as (client,),
    ):
        return check(
            "latency",
            slow,
            n_requests * (0.005 + 1 / 1024),
            lambda: client.write_all(n_requests),
        )


def elevator(slow: float) -> Check:
    """Check the elevator: requests of two files in turn, 8 MiB each, with runs of 4 MiB, take four
    seeks.
    """
    parameters = {"targets": 1, "bandwidth": "256Mi", "seek_ms": 10, "run": "4Mi"}
    with (
        striped("hdd", slow=slow, **parameters, **INSTANT) as mount,
        clients(mount, 8, 8, count=2) as files,
    ):

        def run() -> list[Check]:
            mount.order("freeze")
            waiting = []
            for number in range(8):
                for file in files:
                    waiting.append(file.begin(number))
                    time.sleep(0.005)  # they arrive in this order
            begin = time.monotonic()
            mount.order("restore")
            for one in waiting:
                one.result()
            return [Check("elevator", 4 * 0.01 + 16 / 256, (time.monotonic() - begin) / slow)]

        return best(run)[0]


def metadata_rate(slow: float, operations: int) -> Check:
    """Check the rate of metadata operations: eight threads look up names that do not exist."""
    with (
        striped("ssd", slow=slow, mds_rate=1000, mds_latency_ms=0) as mount,
        ThreadPoolExecutor(8) as threads,
    ):

        def run() -> None:
            list(threads.map(lambda number: (mount.path / str(number)).exists(), range(operations)))

        return check("metadata rate", slow, operations / 1000, run)


def metadata_latency(slow: float, operations: int) -> Check:
    with striped("ssd", slow=slow, mds_rate=0, mds_latency_ms=5) as mount:

        def run() -> None:
            for number in range(operations):
                (mount.path / str(number)).exists()

        return check("metadata latency", slow, operations * 0.005, run)


def sharing(slow: float, n_requests: int) -> list[Check]:
    """Check two clients with a mount each: each gets half of the target."""
    parameters = {"targets": 1, "bandwidth": "64Mi", "seek_ms": 0, "run": 0}
    with (
        striped("hdd", slow=slow, clients=2, **parameters, **INSTANT) as mount,
        clients(mount, n_requests, 4, count=2) as both,
        ThreadPoolExecutor(2) as threads,
    ):

        def run() -> list[Check]:
            begin = time.monotonic()

            def write(client: Client) -> float:
                client.write_all(n_requests)
                return (time.monotonic() - begin) / slow

            return [
                Check(f"share of client {number}", 2 * n_requests / 64, took_s)
                for number, took_s in enumerate(threads.map(write, both))
            ]

        return best(run)


def buffered(slow: float, n_requests: int) -> Check:
    """Check writes through a client's cache, including fsync: they keep the target busy."""
    parameters = {"targets": 1, "bandwidth": "64Mi", "seek_ms": 0, "cache": "client"}
    with (
        striped("hdd", slow=slow, **parameters, **INSTANT) as mount,
        opened(mount.path / "file") as file,
    ):

        def run() -> None:
            for number in range(n_requests):
                os.pwrite(file, bytes(MIB), number * MIB)
            os.fsync(file)

        return check("buffered", slow, n_requests / 64, run)


def validate(slow: float, scale: int = 1) -> Iterator[Check]:
    """Run all checks with this time factor; `scale` multiplies the work of each check."""
    yield bandwidth(slow, 1, 8 * scale)
    yield bandwidth(slow, 8, 64 * scale)
    yield buffered(slow, 8 * scale)
    yield seek(slow, 8 * scale)
    yield latency(slow, 8 * scale)
    yield elevator(slow)
    yield metadata_rate(slow, 64 * scale)
    yield metadata_latency(slow, 16 * scale)
    yield from sharing(slow, 8 * scale)
