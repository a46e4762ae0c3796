# SPDX-License-Identifier: Apache-2.0
"""Measure loads that verify every checksum, into memory that was touched before."""

from functools import partial
from pathlib import Path

from . import fio
from .cache import evict, make_warm, require_cold
from .rounds import GB, Sample, fastest, median_gb_per_s
from .setting import Outcome, Setting, speed_figure

KIB = 1 << 10
MIB = 1 << 20

READ_CHUNKS = (64 * KIB, 256 * KIB, 1 * MIB, 8 * MIB)

OURS = "ioshape"


def make_cold(setting: Setting, path: Path) -> None:
    evict(path)
    setting.rest()
    require_cold(setting, [path])


def read(setting: Setting, path: Path, chunk: int) -> Sample:
    answer = setting.worker.ask("read", path=path, chunk=chunk)
    return Sample(float(answer["seconds"]), path.stat().st_size, answer)


def load(setting: Setting, path: Path, *, check: bool = False) -> Sample:
    answer = setting.worker.ask("load", path=path, check=int(check))
    return Sample(float(answer["seconds"]), setting.size, answer)


def measure_cold(setting: Setting, outcome: Outcome, path: Path) -> None:
    setting.say("cold cache: choosing fio's settings")
    chill = partial(make_cold, setting, path)
    # fio and ioshape read the same blocks of the device.
    fios, speeds = fio.calibrate("read", path, path.stat().st_size, chill)
    chill()
    load(setting, path, check=True)
    setting.say(f"cold cache: {setting.rounds} rounds")
    samples = setting.compare({**fios, OURS: partial(load, setting, path)}, setting.rounds, chill)
    yardstick = fastest(samples, list(fios))
    ceiling = median_gb_per_s(samples[yardstick])
    outcome.samples["cold"] = samples
    outcome.facts["cold"] = {"fio_calibration_gb_per_s": speeds}
    outcome.ceilings.append(f"direct reads: {ceiling:.2f} GB/s ({yardstick})")
    outcome.figures.append(speed_figure("load_vs_fio", 0.95, samples, OURS, yardstick))


def measure_warm(setting: Setting, outcome: Outcome, path: Path) -> None:
    setting.say(f"in the page cache: {setting.rounds} rounds")
    warm = partial(make_warm, setting, path)
    warm()
    speeds = {chunk: read(setting, path, chunk).gb_per_s for chunk in READ_CHUNKS}
    chunk = max(speeds, key=lambda chunk: speeds[chunk])
    load(setting, path, check=True)
    plain = f"read({chunk // KIB}K)"
    samples = setting.compare(
        {OURS: partial(load, setting, path), plain: partial(read, setting, path, chunk)},
        setting.rounds,
        warm,
    )
    ceiling = median_gb_per_s(samples[plain])
    outcome.samples["warm"] = samples
    outcome.facts["warm"] = {"read_gb_per_s_by_chunk": speeds}
    outcome.ceilings.append(f"read() from the page cache, one thread: {ceiling:.2f} GB/s")
    outcome.figures.append(speed_figure("load_cached_vs_read", 0.8, samples, OURS, plain))


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    path = setting.folder / "ours.pt"
    setting.say(f"{setting.size / GB:.2f} GB of mixed tensors: saving what will be loaded")
    answer = setting.worker.ask("tensors", kind="mixed", bytes=setting.size)
    setting.worker.ask("context")
    setting.settle()
    setting.worker.ask("save", path=path)
    outcome.facts["file"] = {"tensors": answer["tensors"], "bytes": path.stat().st_size}
    measure_cold(setting, outcome, path)
    measure_warm(setting, outcome, path)
    setting.settle()
    return outcome
