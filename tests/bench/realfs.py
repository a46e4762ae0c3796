# SPDX-License-Identifier: Apache-2.0
"""Saves, loads and storms on small clusters of real parallel filesystems that run on this host.

    python -m tests.bench.realfs storm cephfs

runs a storm alone and prints what it found. tests/testbed starts the clusters.
"""

import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from clusters import Cluster, running

from . import storm
from .rounds import Contestants, Sample, Samples, median_seconds, speed_ratio
from .setting import Figure, Outcome, Setting

MIB = 1 << 20

OURS, TORCH, PLAIN = "ioshape", "torch", "write() + fsync"
PLAIN_READ = "read()"
#: of a plain write or read; as large as the library's own
CHUNK_BYTES = 4 * MIB

#: by the names of their figures
KINDS = {"ceph": "cephfs", "gluster": "glusterfs"}

RANKS, RANK_BYTES = 8, 32 * MIB
STORM = storm.Part({"slow": 1}, (), ranks=RANKS, n_bytes=RANK_BYTES, nodes=1, rounds=3, blind=True)


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
    import ioshape  # noqa: PLC0415 - with torch, which other benchmarks do without
    import torch  # noqa: PLC0415

    ioshape.configure(unchanged="ignore")  # it saves the same again and again
    memory = mmap.mmap(-1, setting.size)
    whole = torch.frombuffer(memory, dtype=torch.uint8).random_()
    state = {f"weight{number}": part for number, part in enumerate(whole.chunk(8))}
    # A view is saved with all of its storage.
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
        contestant()  # makes buffers and connections, and does not count
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


def ratio_figure(name: str, samples: Samples, least: float, ceiling: str, what: str) -> Figure:
    ours, theirs = samples[OURS], samples[TORCH]
    return Figure(
        name,
        speed_ratio(ours, theirs),
        ">=",
        least,
        f"{what} {median_seconds(theirs):.2f} s, ours {median_seconds(ours):.2f} s, {ceiling} "
        f"{median_seconds(samples[ceiling]):.2f} s",
    )


# ---- Storms -------------------------------------------------------------------------------------


def run_storm(cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Ranks on one client, neighbours on another."""
    with cluster.client() as neighbours, storm.own_environment(STORM) as variables:
        part = replace(STORM, rounds=min(rounds, STORM.rounds))
        return storm.run_on([cluster.path, neighbours], variables, part)


def storm_figures(name: str, found: dict[str, Any]) -> list[Figure]:
    ours, theirs = (found["ways"][way] for way in (storm.OURS, storm.THEIRS))
    alone = found["alone"]["reads"]["p99_ms"]

    def figure(part: str, mine: float, other: float, unit: str, more: str = "") -> Figure:
        remark = f"torch.save {other:.2f} {unit}, ours {mine:.2f} {unit}{more}"
        return Figure(f"{name}_storm_{part}", other / mine, ">=", 1.0, remark)

    return [
        figure("makespan", ours["makespan_s"], theirs["makespan_s"], "s"),
        figure("mean", ours["mean_completion_s"], theirs["mean_completion_s"], "s"),
        figure(
            "neighbour_p99",
            ours["neighbours"]["reads"]["p99_ms"],
            theirs["neighbours"]["reads"]["p99_ms"],
            "ms",
            f", alone {alone:.2f} ms",
        ),
    ]


# ---- Everything ---------------------------------------------------------------------------------


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
            setting.say(f"{name}: {RANKS} ranks x {RANK_BYTES // MIB} MiB beside neighbours")
            found = run_storm(cluster, setting.rounds)
        outcome.samples[f"{name}, saves"] = saved
        outcome.samples[f"{name}, loads by a cold client"] = loaded
        outcome.figures += [
            ratio_figure(f"{name}_save_vs_torch", saved, 1.05, PLAIN, "torch.save + fsync"),
            ratio_figure(f"{name}_load_vs_torch", loaded, 1.0, PLAIN_READ, "torch.load"),
            *storm_figures(name, found),
        ]
        outcome.facts[name] = found
        outcome.ceilings.append(
            f"{name}: {PLAIN} {median_seconds(saved[PLAIN]):.2f} s, "
            f"{PLAIN_READ} {median_seconds(loaded[PLAIN_READ]):.2f} s"
        )
    return outcome


def main(what: str, name: str) -> None:
    """A storm alone."""
    if what != "storm":
        sys.exit(f"realfs: {what} is not known; say storm")
    folder = Path(tempfile.mkdtemp(prefix="ioshape-realfs-", dir="/var/tmp"))
    try:
        with running(name) as cluster:
            found = run_storm(cluster, STORM.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1))
    for figure in storm_figures(name, found):
        print(f"{figure.name} {figure.value:.2f}: {figure.remark}")


if __name__ == "__main__":
    main(*sys.argv[1:])
