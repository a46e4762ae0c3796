# SPDX-License-Identifier: Apache-2.0
"""Make one measurement of the ablation. Each has a new process, so that no caches are warm.

    python -m tests.bench.ablation_process '{"what": "load", "path": …}'

prints the times in seconds as JSON. This process must not start a thread before it forks ranks.
"""

import json
import os
import sys
import time
import uuid
from pathlib import Path
from statistics import fmean
from typing import Any

from ioshape._cli import bench_members
from ioshape._cli.bench_members import Crowd, Member

MIB = 1 << 20
TIMEOUT_S = 600.0
#: Delay in nanoseconds of the model's time, in which all processes receive the order to begin.
LEAD_NS = 100_000_000

Times = dict[str, float]

# ---- One process alone --------------------------------------------------------------------------


def state_of(n_bytes: int, each: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    return {f"weight{number}": torch.rand(each // 4) for number in range(max(n_bytes // each, 1))}


def prepare(path: str, n_bytes: int, each: int) -> Times:
    """Save a file for later calls of load()."""
    import ioshape  # noqa: PLC0415

    ioshape.save(state_of(n_bytes, each), path)
    return {}


def load(path: str, is_cached: bool) -> Times:
    import ioshape  # noqa: PLC0415

    file = os.open(path, os.O_RDONLY)
    if is_cached:
        while os.read(file, 4 * MIB):
            pass
    else:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    begin = time.perf_counter()
    ioshape.load(path)
    return {"load": time.perf_counter() - begin}


# ---- Concurrent jobs ----------------------------------------------------------------------------


class Job:
    """A job whose ranks save at the same moment in the same way."""

    def __init__(self, crowd: Crowd, name: str, count: int, n_bytes: int, way: str, folder: Path):
        token = f"{name}-{uuid.uuid4().hex[:8]}"
        self.way = way
        self.members: list[Member] = []
        for rank in range(count):
            variables = bench_members.launcher_variables(rank, count, token)
            place = bench_members.RankSetup(rank, variables, n_bytes, folder / name)
            self.members.append(crowd.start(f"{name} {rank}", bench_members.rank(place)))
        (folder / name / way).mkdir(parents=True)

    def begin(self, step: int, at_ns: int) -> None:
        for member in self.members:
            member.tell(bench_members.Order(self.way, step, at_ns))


def await_all(crowd: Crowd, jobs: list[Job]) -> list[list[bench_members.Saved]]:
    answers = iter(crowd.hear([one for job in jobs for one in job.members], TIMEOUT_S))
    return [[next(answers) for _ in job.members] for job in jobs]


def three_jobs(folder: str, slow: int) -> Times:
    """Time a job with blocking saves beside two larger jobs with background saves."""
    second_ns = 1e9 * slow  # of the model
    with Crowd() as crowd:
        jobs = [
            Job(crowd, "stands-still", 8, 8 * MIB, "save", Path(folder)),
            Job(crowd, "background", 8, 32 * MIB, "async", Path(folder)),
            Job(crowd, "large", 4, 64 * MIB, "async", Path(folder)),
        ]
        await_all(crowd, jobs)
        for step in range(2):  # the first step is a warm-up
            at_ns = time.monotonic_ns() + LEAD_NS * slow
            for job in jobs:
                job.begin(step, at_ns)
            saved = await_all(crowd, jobs)
    return {
        "training stands still": sum(
            (one.returned_ns - one.begin_ns) / second_ns for job in saved for one in job
        ),
        "all saved": max((one.end_ns - at_ns) / second_ns for job in saved for one in job),
    }


def small_beside_large(folder: str, slow: int) -> Times:
    """Time small saves that start while other ranks save large files."""
    second_ns = 1e9 * slow  # of the model
    small_saves = 8
    with Crowd() as crowd:
        large = Job(crowd, "large", 8, 64 * MIB, "async", Path(folder))
        small = Job(crowd, "small", 2, MIB, "save", Path(folder))
        await_all(crowd, [large, small])
        at_ns = time.monotonic_ns() + LEAD_NS * slow
        large.begin(0, at_ns)
        for number in range(small_saves):
            small.begin(number, at_ns + (number + 1) * LEAD_NS * slow)
        saved = [await_all(crowd, [small])[0] for _ in range(small_saves)]
        (ended,) = await_all(crowd, [large])
    return {
        "small save": fmean(
            (one.end_ns - one.begin_ns) / second_ns for together in saved for one in together
        ),
        "all saved": max((one.end_ns - at_ns) / second_ns for one in ended),
    }


MEASURED = {one.__name__: one for one in (prepare, load, three_jobs, small_beside_large)}


def main(text: str) -> None:
    given = json.loads(text)
    print(json.dumps(MEASURED[given.pop("what")](**given)))


if __name__ == "__main__":
    main(*sys.argv[1:])
