# SPDX-License-Identifier: Apache-2.0
"""What a storm of plain writers looks like on stripefs, without torch and without ioshape.

    python tests/support/striped_storm.py hdd --set stripe_count=8 --set cache=back

Prints makespan and mean completion of the writers, and how long a neighbour's small reads take
before and during it.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from striped import Mount, striped

SMALL_BYTES = 4096


def write(path: Path, size: int, gate: Connection, result: Connection, piece: int) -> None:
    """In a process of its own."""
    data = memoryview(random.Random(0).randbytes(1 << 20) * (size >> 20))
    result.send(None)
    gate.recv()
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for at in range(0, size, piece):
        part = data[at : at + piece]
        while part:
            part = part[os.write(file, part) :]
    os.fsync(file)
    os.close(file)
    result.send(time.monotonic())


def read(folder: Path, files: int, gate: Connection, result: Connection) -> None:
    """The neighbour: small reads that no cache answers, one after the other, until it is told."""
    buffer = mmap.mmap(-1, SMALL_BYTES)
    handles = [os.open(folder / str(i), os.O_RDONLY | os.O_DIRECT) for i in range(files)]
    chance = random.Random(1)
    samples = []
    while not gate.poll():
        begin = time.monotonic()
        os.preadv(handles[chance.randrange(files)], [buffer], 0)
        samples.append((begin, time.monotonic() - begin))
        time.sleep(0.002)
    result.send(samples)


def start(work: object, *arguments: object) -> tuple[int, Connection, Connection]:
    """Forks; a connection that tells it to go, and one that says what it has to say."""
    gate, go = Pipe(duplex=False)
    told, result = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments[:2], gate, result, *arguments[2:])  # type: ignore[operator]
        finally:
            os._exit(0)
    return pid, go, told


def percentile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def storm(mount: Mount, ranks: int, size: int, piece: int, alone_s: float) -> dict[str, object]:
    """Runs it once."""
    small = mount.path / "small"
    small.mkdir()
    for i in range(64):
        (small / str(i)).write_bytes(bytes(SMALL_BYTES))
    neighbour, stop, told = start(read, small, 64)
    writers = [start(write, mount.path / f"rank{i}", size, piece) for i in range(ranks)]
    for _, _, ready in writers:
        ready.recv()
    time.sleep(alone_s)
    mount.reset()
    begin = time.monotonic()
    for _, go, _ in writers:
        go.send(None)
    ends = [done.recv() - begin for _, _, done in writers]
    counted = mount.statistics()
    stop.send(None)
    samples = told.recv()
    for pid in [neighbour, *(pid for pid, _, _ in writers)]:
        os.waitpid(pid, 0)
    alone = [took for at, took in samples if at + took < begin]
    during = [took for at, took in samples if begin <= at + took and at < begin + max(ends)]
    return {
        "makespan_s": round(max(ends), 2),
        "mean_completion_s": round(statistics.mean(ends), 2),
        "alone_p99_ms": round(1000 * percentile(alone, 0.99), 1),
        "neighbour_p50_ms": round(1000 * percentile(during, 0.5), 1),
        "neighbour_p99_ms": round(1000 * percentile(during, 0.99), 1),
        "neighbour_reads": len(during),
        "seeks": sum(target["seeks"] for target in counted["targets"]),
        "longest_queue": max(target["longest_queue"] for target in counted["targets"]),
        "write_requests": counted["writes"]["requests"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("profile", choices=["hdd", "ssd", "nfs"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--mib", type=int, default=32, help="of each rank")
    parser.add_argument("--piece-mib", type=int, default=32, help="what one write is asked for")
    parser.add_argument("--alone-s", type=float, default=1.0)
    given = parser.parse_args()
    parameters: dict[str, object] = dict(pair.split("=", maxsplit=1) for pair in given.set)
    with striped(given.profile, **parameters) as mount:
        figures = storm(mount, given.ranks, given.mib << 20, given.piece_mib << 20, given.alone_s)
    json.dump({"profile": given.profile, **parameters, **figures}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
