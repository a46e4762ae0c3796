# SPDX-License-Identifier: Apache-2.0
"""The driver behind tests/bench.sh, which says what it does and prepares what it needs."""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import background, fio, load, report, save
from .setting import Outcome, Setting
from .worker import Worker, WorkerError

# Each is a function that measures and returns figures: a new benchmark is a module and a line here.
BENCHMARKS: dict[str, Callable[[Setting], Outcome]] = {
    "save": save.measure,
    "load": load.measure,
    "async": background.measure,
}

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# Tensors, a copy of them, and the page cache or staging memory.
COPIES_IN_MEMORY = 3
COPIES_ON_DISK = 2


def size_in_bytes(text: str) -> int:
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a size like 4G or 512M")
    return int(number) * unit


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/bench.sh", usage="tests/bench.sh --help tells")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", type=size_in_bytes, default=size_in_bytes("4G"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown or not given.names:
        parser.error(f"name one or more of: {', '.join(BENCHMARKS)}")
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    return given


def refuse_if_too_large(size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < size * COPIES_ON_DISK:
        sys.exit(
            f"bench: {folder} has {free >> 20} MiB free; this needs {size * COPIES_ON_DISK >> 20}"
        )
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cache = report.first_line_of("/proc/meminfo", "Cached").split()[0]
    available += int(cache) << 10 if cache.isdecimal() else 0
    if available < size * COPIES_IN_MEMORY:
        sys.exit(
            f"bench: {available >> 20} MiB of memory are free; this needs "
            f"{size * COPIES_IN_MEMORY >> 20}: use a smaller --size"
        )


def end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """As an exception, so that fio and the worker have ended when we do."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, end_on_signal)
    given = parse_arguments()
    refuse_if_too_large(given.size, given.folder)
    if given.json:
        given.json.touch()  # better now than after minutes
    context: dict[str, object] = {
        **report.machine(given.folder),
        "fio_version": fio.version(),
        "rounds": given.rounds,
        "size": given.size,
        "load_before": os.getloadavg()[0],
    }
    outcomes = {}
    began = time.monotonic()
    try:
        with Worker(given.worker) as worker:
            setting = Setting(worker, given.folder, given.size, given.rounds)
            for name in given.names:
                print(f"{name}:", flush=True)
                outcomes[name] = BENCHMARKS[name](setting)
    except (WorkerError, fio.FioError, load.CacheError) as error:
        sys.exit(f"bench: {error}")
    context["seconds"] = round(time.monotonic() - began)
    print(report.as_text(outcomes, context))
    if given.json:
        text = json.dumps(report.as_json(outcomes, context), indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
