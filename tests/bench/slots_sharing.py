# SPDX-License-Identifier: Apache-2.0
"""Measure how evenly jobs share slots, and how exactly a set bandwidth is kept."""

import time
from dataclasses import dataclass
from pathlib import Path

from ioshape._slots.pools import Operator

from tests.simulate.fairness import jain

from .setting import Figure, Outcome, Setting
from .slots_turns import new_worker
from .worker import Worker

MIB = 1 << 20
MB = 1_000_000


# ---- Shares of slots -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Ranks that ask for a slot again as soon as they have released one."""

    name: str
    ranks: int
    hold_ms: int

    @property
    def bytes(self) -> int:
        """The size that each request states, too large for the small-file bypass of the queue."""
        return self.hold_ms * 4 * MIB


JOBS = [Job("many", 16, 20), Job("some", 8, 50), Job("few", 4, 100), Job("two", 2, 200)]
SLOTS = 2
WARM_S, SHARED_S = 2, 10


def share_slots(setting: Setting, address: str) -> dict[str, float]:
    """Return the slot-seconds of each job while all jobs compete."""
    ranks: list[tuple[Job, Worker]] = [
        (job, new_worker(setting, address, "shared", job=job.name, slots=SLOTS))
        for job in JOBS
        for _ in range(job.ranks)
    ]
    begin = time.monotonic_ns() + WARM_S * 10**9
    for job, worker in ranks:
        worker.tell(
            "contend",
            from_ns=begin,
            until_ns=begin + SHARED_S * 10**9,
            hold_us=job.hold_ms * 1000,
            bytes=job.bytes,
        )
    had = dict.fromkeys((job.name for job in JOBS), 0.0)
    for job, worker in ranks:
        with worker:
            had[job.name] += float(worker.hear("contend")["held_s"])
    return had


def measure_jain(setting: Setting, outcome: Outcome, address: str) -> None:
    """Measure fairness with Redis. Local pools have no shares."""
    setting.say(f"{len(JOBS)} jobs share {SLOTS} slots")
    slot_seconds = share_slots(setting, address)
    outcome.facts["jain"] = {
        "jobs": [f"{job.ranks} ranks, {job.hold_ms} ms each" for job in JOBS],
        "slots": SLOTS,
        "seconds": SHARED_S,
        "slot_seconds": slot_seconds,
    }
    told = ", ".join(f"{seconds:.2f}" for seconds in slot_seconds.values())
    value = jain(list(slot_seconds.values()))
    outcome.figures.append(Figure("jain", value, ">=", 0.95, f"of {told} slot-seconds"))


# ---- Bandwidth -----------------------------------------------------------------------------------

RATES = [20 * MB, 80 * MB, 200 * MB]  # bytes per second of a job with one writer
POOL_RATE, POOL_WRITERS = 80 * MB, 2
PACED_S = 10
SAVE_S = 2  # approximate seconds of a save; pauses between saves count, too
MOST_TENSOR_BYTES = SAVE_S * (sum(RATES) + POOL_RATE)


class Stream:
    """Writers that save repeatedly, and the rate that is set for them."""

    def __init__(self, name: str, rate: int) -> None:
        self.name, self.rate = name, rate
        self._writers: list[Worker] = []
        self._first = (0.0, 0)
        self.error = 0.0

    def add(self, setting: Setting, worker: Worker, writers: int) -> None:
        worker.ask("tensors", kind="equal", count=8, each=self.rate * SAVE_S // writers // 8)
        path = setting.folder / f"paced-{worker.process.pid}"
        worker.tell("stream", seconds=PACED_S + 2, path=path)
        self._writers.append(worker)

    def _written(self) -> tuple[float, int]:
        total = 0
        for worker in self._writers:
            text = Path(f"/proc/{worker.process.pid}/io").read_text(encoding="ascii")
            total += int(text.partition("\nwrite_bytes: ")[2].split()[0])
        return time.monotonic(), total

    def begin(self) -> None:
        self._first = self._written()

    def end(self) -> None:
        began, before = self._first
        ended, after = self._written()
        self.error = (after - before) / (ended - began) / self.rate - 1

    def close(self) -> None:
        for worker in self._writers:
            with worker:
                worker.hear("stream")


def pool_stream(setting: Setting, address: str) -> Stream:
    """Start two jobs in a pool whose rate was set by the operator."""
    stream = Stream(f"redis, a pool's {POOL_RATE // MB} MB/s, two jobs", POOL_RATE)
    workers = [
        new_worker(setting, address, "paced", job=f"job{number}") for number in range(POOL_WRITERS)
    ]
    Operator(address).set("paced", capacity=POOL_WRITERS, pool_bytes_per_s=POOL_RATE)
    for worker in workers:
        stream.add(setting, worker, POOL_WRITERS)
    return stream


def pace(setting: Setting, kind: str, address: str) -> list[Stream]:
    """Run all streams at the same time."""
    streams = []
    for rate in RATES:
        stream = Stream(f"{kind}, a job's {rate // MB} MB/s", rate)
        pool = f"paced-{rate // MB}"
        stream.add(setting, new_worker(setting, address, pool, rate=rate, slots=1), 1)
        streams.append(stream)
    if kind == "redis":
        streams.append(pool_stream(setting, address))
    time.sleep(1)
    for stream in streams:
        stream.begin()
    time.sleep(PACED_S)
    for stream in streams:
        stream.end()
    for stream in streams:
        stream.close()
    return streams


def measure_pace(setting: Setting, outcome: Outcome, coordinators: dict[str, str]) -> None:
    setting.say(f"bandwidth, {PACED_S} s with each coordinator")
    streams = []
    for kind, address in coordinators.items():
        setting.settle()
        streams += pace(setting, kind, address)
    setting.settle()
    outcome.facts["pace"] = {
        "counted": "write_bytes of the writers, between two moments, saves one after another",
        "errors": {stream.name: stream.error for stream in streams},
    }
    worst = max(streams, key=lambda stream: abs(stream.error))
    outcome.figures.append(
        Figure(
            "pace_error",
            abs(worst.error),
            "<=",
            0.05,
            f"the worst of {len(streams)}: {worst.error:+.3f} with {worst.name}",
        )
    )


def measure(setting: Setting, outcome: Outcome, redis: str, local: str) -> None:
    measure_jain(setting, outcome, redis)
    measure_pace(setting, outcome, {"redis": redis, "local": local})
