# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks. tests/bench.sh starts this driver and installs packages for it."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from clusters import IN_MACHINE, PROGRAMS, ClusterError

from . import (
    ablation,
    background,
    cache,
    english,
    examine,
    fio,
    frameworks,
    fs,
    gather,
    gpu,
    house,
    launch,
    load,
    nil,
    preload,
    realfs,
    report,
    save,
    simulate,
    slots,
    storm,
    tier,
    torch_figures,
)
from .setting import Outcome, Setting
from .worker import Worker, WorkerError

SETUP = Path(__file__).resolve().parents[1] / "support" / "setup.sh"
CLUSTER_NEEDS = ("realfs",)

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Benchmark:
    measure: Callable[[Setting], Outcome]
    size: int = 4 << 30
    # Multiples of `size` in memory: tensors, a copy of them, and the page cache or staging memory.
    copies_in_memory: int = 3
    copies_on_disk: int = 2
    # Purposes of tests/support/setup.sh in addition to "bench", which tests/bench.sh prepares.
    needs: tuple[str, ...] = ()


# To add a benchmark, add a module, a line here and a paragraph in the usage of tests/bench.sh.
BENCHMARKS = {
    "save": Benchmark(save.measure),
    "load": Benchmark(load.measure),
    # Tensors. The file has no content.
    "nil": Benchmark(nil.measure, size=2 << 30, copies_in_memory=1, copies_on_disk=1),
    "async": Benchmark(background.measure),
    # Four processes hold tensors, one of them also a copy. The rest is page cache.
    "torch": Benchmark(torch_figures.measure, size=2 << 30, copies_in_memory=6),
    # Eight processes hold tensors, a copy and staging memory. One process holds as many bytes as
    # all eight. The output of one writer, whose memory is measured, is also on disk.
    "gather": Benchmark(gather.measure, size=2 << 30, copies_in_memory=5, copies_on_disk=5),
    "slots": Benchmark(slots.measure, size=slots.TENSOR_BYTES, copies_in_memory=2),
    # One gigabyte is on the disk at a time.
    "fs": Benchmark(fs.measure, size=2 << 30, copies_in_memory=1, copies_on_disk=1),
    # Ranks hold tensors, staging and shared memory. The files in stripefs are in memory, too.
    "storm": Benchmark(storm.measure, size=1 << 30, copies_in_memory=6, copies_on_disk=0),
    # Tensors, a copy of them and the caches of clients and servers. On disk: three files and their
    # copies.
    "realfs": Benchmark(
        realfs.measure, size=512 << 20, copies_in_memory=6, copies_on_disk=8, needs=CLUSTER_NEEDS
    ),
    # It needs what storm needs, and space on the disk for the tensors of one process.
    "ablation": Benchmark(ablation.measure, size=512 << 20, copies_in_memory=12, copies_on_disk=8),
    # Ranks hold and copy tensors; the files in stripefs are in memory, too. On disk: a build.
    "preload": Benchmark(
        preload.measure, size=1 << 30, copies_in_memory=6, copies_on_disk=1, needs=("test",)
    ),
    # Tensors, staging memory, and two files in the page cache.
    "examine": Benchmark(examine.measure, size=2 << 30, needs=("test",)),
    # Tensors and the page cache. The files in stripefs are in memory, and smaller.
    "tier": Benchmark(tier.measure),
    # Four ranks hold tensors and staging memory.
    "frameworks": Benchmark(frameworks.measure, size=2 << 30, copies_in_memory=3, needs=("test",)),
    # Tensors on their way to the GPU, and the page cache.
    "gpu": Benchmark(gpu.measure),
    # The benchmark is a simulation and needs neither memory nor disk.
    "simulate": Benchmark(simulate.measure, size=1, copies_in_memory=0, copies_on_disk=0),
    # These benchmarks only read the source tree.
    "house": Benchmark(house.measure, size=1, copies_in_memory=0, copies_on_disk=0),
    "english": Benchmark(english.measure, size=1, copies_in_memory=0, copies_on_disk=0),
    # The benchmark builds packages in a folder of its own.
    "launch": Benchmark(
        launch.measure, size=1, copies_in_memory=0, copies_on_disk=0, needs=("launch",)
    ),
}


#: Values of --on for each benchmark that takes it.
CLUSTERS = (*PROGRAMS, *IN_MACHINE)
PLACES = {
    "storm": CLUSTERS,
    "preload": CLUSTERS,
    "ablation": tuple(ablation.SCENES),
}


def size_in_bytes(text: str) -> int:
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a size like 4G or 512M")
    return int(number) * unit


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/bench.sh", usage="tests/bench.sh --help tells")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", type=size_in_bytes)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--on", default="")
    parser.add_argument("--worker", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown or not given.names:
        parser.error(f"name one or more of: {', '.join(BENCHMARKS)}")
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    if given.on and any(given.on not in PLACES.get(name, ()) for name in given.names):
        parser.error("--on names a cluster for storm and preload, or a scene for ablation")
    return given


def refuse_if_too_large(name: str, size: int, folder: Path) -> None:
    on_disk = size * BENCHMARKS[name].copies_on_disk
    in_memory = size * BENCHMARKS[name].copies_in_memory
    free = shutil.disk_usage(folder).free
    if free < on_disk:
        sys.exit(f"bench: {folder} has {free >> 20} MiB free; {name} needs {on_disk >> 20}")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cache = report.first_line_of("/proc/meminfo", "Cached").split()[0]
    available += int(cache) << 10 if cache.isdecimal() else 0
    if available < in_memory:
        sys.exit(
            f"bench: {available >> 20} MiB of memory are free; {name} needs {in_memory >> 20}: use "
            "a smaller --size"
        )


def install(purposes: Iterable[str]) -> None:
    """Install the system packages that these purposes take."""
    for purpose in purposes:
        if subprocess.run([SETUP, purpose], check=False).returncode:
            sys.exit(f"bench: cannot install what the purpose {purpose!r} takes; see above")


def end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that fio and the worker end before this process."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, end_on_signal)
    given = parse_arguments()
    sizes = {name: given.size or BENCHMARKS[name].size for name in given.names}
    for name, size in sizes.items():
        refuse_if_too_large(name, size, given.folder)
    if given.json:
        given.json.touch()  # fail now rather than after minutes
    needs = [purpose for name in given.names for purpose in BENCHMARKS[name].needs]
    install(dict.fromkeys([*needs, *(CLUSTER_NEEDS if given.on else ())]))
    context: dict[str, object] = {
        **report.machine(given.folder),
        "fio_version": fio.version(),
        "rounds": given.rounds,
        "sizes": sizes,
        "load_before": os.getloadavg()[0],
    }
    outcomes = {}
    began = time.monotonic()
    try:
        with Worker(given.worker) as worker:
            for name in given.names:
                print(f"{name}:", flush=True)
                setting = Setting(worker, given.folder, sizes[name], given.rounds, given.on)
                outcomes[name] = BENCHMARKS[name].measure(setting)
    except (
        WorkerError,
        fio.FioError,
        cache.CacheError,
        storm.StormError,
        ClusterError,
    ) as error:
        sys.exit(f"bench: {error}")
    context["seconds"] = round(time.monotonic() - began)
    print(report.as_text(outcomes, context))
    if given.json:
        text = json.dumps(report.as_json(outcomes, context), indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
