# SPDX-License-Identifier: Apache-2.0
"""Measure saves and loads on small clusters of real parallel filesystems on this host."""

import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from clusters import Cluster, running

from .rounds import Contestants, Sample, Samples, median_seconds
from .setting import Outcome, Setting, speed_figure

MIB = 1 << 20

OURS, TORCH, PLAIN = "ioshape", "torch", "write() + fsync"
PLAIN_READ = "read()"
#: Bytes of one plain write or read, as large as a request of the library.
CHUNK_BYTES = 4 * MIB

#: Kinds of clusters by the names of their figures.
KINDS = {"ceph": "cephfs", "gluster": "glusterfs"}


# ---- Saves and loads ----------------------------------------------------------------------------


def timed(work: Callable[[], object], n_bytes: int) -> Sample:
    begin = time.perf_counter()
    work()
    return Sample(time.perf_counter() - begin, n_bytes)


def write_plainly(path: Path, memory: mmap.mmap) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with memoryview(memory) as view:
            for offset in range(0, len(memory), CHUNK_BYTES):
                os.write(file, view[offset : offset + CHUNK_BYTES])
        os.fsync(file)
    finally:
        os.close(file)


def read_plainly(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        while os.read(file, CHUNK_BYTES):
            pass
    finally:
        os.close(file)


def save_and_load(setting: Setting, cluster: Cluster) -> tuple[Samples, Samples]:
    import ioshape  # noqa: PLC0415 - imports torch, which other benchmarks do not need
    import torch  # noqa: PLC0415

    ioshape.configure(examine="off")  # the same state is saved again and again
    memory = mmap.mmap(-1, setting.size)
    whole = torch.frombuffer(memory, dtype=torch.uint8).random_()
    state = {f"weight{number}": part for number, part in enumerate(whole.chunk(8))}
    # torch saves a view with all of its storage, so the parts are cloned
    state = {name: part.clone() for name, part in state.items()}

    def save_with_torch() -> None:
        with (cluster.path / "torch.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    saves: Contestants = {
        OURS: partial(timed, lambda: ioshape.save(state, cluster.path / "ours.pt"), setting.size),
        TORCH: partial(timed, save_with_torch, setting.size),
        PLAIN: partial(timed, lambda: write_plainly(cluster.path / "plain", memory), setting.size),
    }
    for contestant in saves.values():
        contestant()  # the first run makes buffers and connections and does not count
    saved = setting.compare(saves, setting.rounds, setting.rest)

    def load_with(load: Callable[[Path], object], name: str) -> Sample:
        with cluster.client() as point:
            return timed(partial(load, point / name), setting.size)

    loads: Contestants = {
        OURS: partial(load_with, ioshape.load, "ours.pt"),
        TORCH: partial(load_with, torch.load, "torch.pt"),
        PLAIN_READ: partial(load_with, read_plainly, "plain"),
    }
    return saved, setting.compare(loads, setting.rounds, setting.rest)


# ---- All clusters -------------------------------------------------------------------------------


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "clusters of tests/testbed, all servers and clients on this host; defaults; each load by "
        "a client that has just mounted; ways in turns, medians of rounds"
    )
    for name, kind in KINDS.items():
        setting.say(f"{name}: starting a cluster")
        with running(kind) as cluster:
            setting.say(f"{name}: saves and loads, {setting.rounds} rounds")
            saved, loaded = save_and_load(setting, cluster)
        outcome.samples[f"{name}, saves"] = saved
        outcome.samples[f"{name}, loads by a cold client"] = loaded
        outcome.figures += [
            speed_figure(f"{name}_save_vs_torch", 1.05, saved, OURS, TORCH, ", with fsync"),
            speed_figure(f"{name}_load_vs_torch", 1.0, loaded, OURS, TORCH),
        ]
        outcome.ceilings.append(
            f"{name}: {PLAIN} {median_seconds(saved[PLAIN]):.2f} s, "
            f"{PLAIN_READ} {median_seconds(loaded[PLAIN_READ]):.2f} s"
        )
    return outcome
