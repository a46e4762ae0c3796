# SPDX-License-Identifier: Apache-2.0
"""Measure ranks of one host that load the same file, as data-parallel ranks do at a restart."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from .cache import evict, make_warm, require_cold
from .gather_ranks import Ranks, all_of
from .gather_torch import OURS, TORCH, lone_ranks, torch_ranks
from .rounds import Sample
from .setting import Figure, Outcome, Setting, time_figure
from .torch_worker import ROOM_FOR_ONE, Ballast

Start = Callable[[int], AbstractContextManager[Ranks]]
STARTS: dict[str, Start] = {"by a launcher": partial(torch_ranks, 1), "without one": lone_ranks}

# The number of ranks in a restart that is timed. The read bytes are counted with more ranks.
RANKS = 4
READERS = 8
MOST_BYTES = 152 << 20


def files(setting: Setting) -> dict[str, Path]:
    return {OURS: setting.folder / "ours.pt", TORCH: setting.folder / "torch.pt"}


def load(ranks: Ranks, how: str, path: Path, *, check: bool = False) -> Sample:
    answers = ranks.together("load_file", how=how, path=path, check=int(check))
    sample = all_of(answers, ranks.tensor_bytes)
    read = sum(float(one["read_bytes"]) for one in answers)
    sample.details = {**sample.details, "read_ratio": read / path.stat().st_size}
    return sample


def take_room(setting: Setting, ranks: Ranks) -> Ballast:
    ballast = Ballast(int((len(ranks.workers) + 1) * ranks.tensor_bytes * ROOM_FOR_ONE))
    ballast.take()
    setting.rest()
    return ballast


def chill(setting: Setting, ranks: Ranks) -> None:
    for path in files(setting).values():
        evict(path)
    ballast = take_room(setting, ranks)
    require_cold(setting, files(setting).values())
    ballast.give()


def warm(setting: Setting, ranks: Ranks) -> None:
    ballast = take_room(setting, ranks)
    for path in files(setting).values():
        make_warm(setting, path)
    ballast.give()


@contextmanager
def readers(setting: Setting, count: int, start: Start) -> Iterator[dict[str, Ranks]]:
    """Start ranks that load ioshape's file, and other ranks that load torch's file.

    A load by ioshape leaves the process with memory in huge pages. A torch.load in the same process
    would then profit from it.
    """
    paths = files(setting)
    with ExitStack() as stack:
        crews = {how: stack.enter_context(start(count)) for how in paths}
        for ranks in crews.values():
            size = min(setting.size // count, MOST_BYTES)
            ranks.tensor_bytes = float(ranks.each("make", size=size)[0]["bytes"])
        setting.clear()
        crews[OURS].workers[0].ask("save_file", path=paths[OURS])
        crews[TORCH].workers[0].ask("save_torch", path=paths[TORCH])
        for how, ranks in crews.items():
            ranks.each("forget")
            load(ranks, how, paths[how], check=True)
        yield crews


def read_ratio(setting: Setting, outcome: Outcome, ranks: Ranks, started: str) -> float:
    setting.say(f"{READERS} ranks, started {started}, load one file: {setting.rounds} rounds")
    paths = files(setting)
    samples = setting.compare(
        {OURS: partial(load, ranks, OURS, paths[OURS])},
        setting.rounds,
        partial(chill, setting, ranks),
    )
    ratios = [float(sample.details["read_ratio"]) for sample in samples[OURS]]
    outcome.samples[f"one file, {READERS} ranks started {started}"] = samples
    return median(ratios)


def judge_time(
    setting: Setting, outcome: Outcome, crews: dict[str, Ranks], state: str, most: float
) -> None:
    setting.say(f"{RANKS} ranks load one file, {state}: {setting.rounds} rounds")
    loaders = {how: partial(load, crews[how], how, path) for how, path in files(setting).items()}
    prepare = chill if state == "cold" else warm
    samples = setting.compare(dict(loaders), setting.rounds, partial(prepare, setting, crews[OURS]))
    outcome.samples[f"one file, {RANKS} ranks, {state}"] = samples
    name = f"load_same_file_vs_torch_{state}"
    outcome.figures.append(time_figure(name, most, samples, OURS, TORCH))


def measure(setting: Setting, outcome: Outcome) -> None:
    ratios = []
    for started, start in STARTS.items():
        with readers(setting, READERS, start) as crews:
            ratios.append(read_ratio(setting, outcome, crews[OURS], started))
    outcome.figures.append(
        Figure(
            "load_same_file_bytes",
            max(ratios),
            "<=",
            1.05,
            f"bytes that {READERS} ranks read from the disk to those of the file, cold cache; "
            f"the larger of two ways to start them: {', '.join(STARTS)}",
        )
    )
    with readers(setting, RANKS, STARTS["by a launcher"]) as crews:
        judge_time(setting, outcome, crews, "cold", 0.9)
        judge_time(setting, outcome, crews, "warm", 1.1)
    setting.clear()
