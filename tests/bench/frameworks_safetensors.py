# SPDX-License-Identifier: Apache-2.0
"""Compare saving and loading files by ioshape.safetensors and by the original safetensors."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from . import fio
from .cache import evict, require_cold
from .rounds import GB, Sample, Samples, fastest, median_gb_per_s, speed_ratio
from .setting import Figure, Outcome, Setting

MIB = 1 << 20
TENSORS = 48
FIO_TUNINGS = 2
OURS, ORIGINAL, PREAD = "ioshape", "original + fsync", "original, pread"

# The program answers each line with seconds. The original only maps a file when it loads, so load()
# also reads its pages.
PROGRAM = f"""\
import os
import sys
import time

import ioshape.safetensors as ours
import safetensors.torch as original
import torch

def save(path):
    if path.endswith("ioshape"):
        ours.save_file(state, path, checksums=True)
        return
    original.save_file(state, path)
    for name, flags in ((path, os.O_RDWR), (os.path.dirname(path), os.O_RDONLY)):
        file = os.open(name, flags)
        os.fsync(file)
        os.close(file)

def load(path, how):
    if how == "ioshape":
        return ours.load_file(path)
    loaded = original.load_file(path, backend=how)
    for tensor in loaded.values():
        tensor.view(torch.uint8)[::4096].sum()
    return loaded

values = int(sys.argv[1]) // {TENSORS} // 4
state = {{f"layer.{{i}}": torch.full((values,), i + 0.5) for i in range({TENSORS})}}
for line in sys.stdin:
    verb, *arguments = line.split()
    if verb == "save":
        state["layer.0"] += 1  # or each save would say that nothing has changed
    begin = time.perf_counter()
    loaded = {{"save": save, "load": load}}[verb](*arguments)
    seconds = time.perf_counter() - begin
    if loaded is not None:
        assert all(torch.equal(loaded[name], state[name]) for name in state)
    loaded = None  # a file that is mapped stays in the page cache
    print(seconds, flush=True)
"""


@contextmanager
def program(size: int) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


def ask(child: "subprocess.Popen[str]", n_bytes: int, *words: object) -> Sample:
    assert child.stdin is not None
    assert child.stdout is not None
    print(*words, file=child.stdin, flush=True)
    return Sample(float(child.stdout.readline()), n_bytes)


def ratio(name: str, target: float, samples: Samples, theirs: str, what: str = "") -> Figure:
    return Figure(
        name,
        speed_ratio(samples[OURS], samples[theirs]),
        ">=",
        target,
        f"{median_gb_per_s(samples[OURS]):.2f} GB/s{what} to "
        f"{median_gb_per_s(samples[theirs]):.2f} GB/s of {theirs}",
    )


def measure_saves(setting: Setting, outcome: Outcome, child: "subprocess.Popen[str]") -> None:
    path, size = setting.folder / "fio", setting.size // (16 * MIB) * 16 * MIB
    setting.say("safetensors: choosing fio's settings")
    tunings, _ = fio.calibrate("write", path, size, setting.settle)
    fios = {str(one): partial(fio.run, one, "write", path, size) for one in tunings[:FIO_TUNINGS]}
    files = {OURS: setting.folder / "ioshape", ORIGINAL: setting.folder / "original"}
    runs = {how: partial(ask, child, setting.size, "save", file) for how, file in files.items()}
    setting.say(f"safetensors, {setting.size / GB:.2f} GB, saved: {setting.rounds} rounds")
    samples = setting.compare({**fios, **runs}, setting.rounds, setting.settle)
    outcome.samples["safetensors, saved"] = samples
    outcome.figures += [
        ratio("safetensors_save_vs_original_fsync", 1.5, samples, ORIGINAL, ", with checksums"),
        ratio("safetensors_save_vs_fio", 0.9, samples, fastest(samples, list(fios))),
    ]


def measure_loads(setting: Setting, outcome: Outcome, child: "subprocess.Popen[str]") -> None:
    """Measure loads of files that are on disk and not in the page cache."""
    setting.settle()
    path = setting.folder / "ioshape"
    ask(child, setting.size, "save", path)

    def chill() -> None:
        evict(path)
        setting.rest()
        require_cold(setting, [path])

    ways = {OURS: "ioshape", "original": "mmap", PREAD: "pread"}
    runs = {how: partial(ask, child, setting.size, "load", path, way) for how, way in ways.items()}
    setting.say(f"safetensors, loaded with a cold cache: {setting.rounds} rounds")
    samples = setting.compare(runs, setting.rounds, chill)
    outcome.samples["safetensors, loaded"] = samples
    better = fastest(samples, ["original", PREAD])
    outcome.figures.append(
        ratio("safetensors_load_vs_original", 1.2, samples, better, ", verified")
    )


def measure(setting: Setting, outcome: Outcome) -> None:
    with program(setting.size) as child:
        measure_saves(setting, outcome, child)
        measure_loads(setting, outcome, child)
