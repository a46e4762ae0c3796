# SPDX-License-Identifier: Apache-2.0
"""Run the campaign. tests/campaign.sh starts this driver and installs its packages."""

import argparse
import contextlib
import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import crowd, faults, files, frameworks, fuzz, kills, ledger, power, slots
from .ledger import Slice
from .trial import CannotTry, Trial

Try = Callable[[int], Trial]
MakeReady = Callable[[Path], AbstractContextManager[Try]]


@dataclass(frozen=True)
class Kind:
    """A kind of trial. `trials` yields them, keeps files in a folder, and cleans up at the end."""

    trials: MakeReady
    #: Trials for --short, for kinds whose seeds do not determine all that trials do.
    short: MakeReady | None = None
    n_short: int = 1


# To add a kind, add a module and a line here.
KINDS = {
    "crowd": Kind(crowd.trials),
    "faults": Kind(faults.trials),
    "files": Kind(files.trials),
    "frameworks": Kind(frameworks.trials, frameworks.short, len(frameworks.SCENES)),
    "fuzz": Kind(fuzz.trials, fuzz.short, len(fuzz.names())),
    "kills": Kind(kills.trials),
    "power": Kind(power.trials),
    "slots": Kind(slots.trials),
}

WORK = Path("build/campaign").resolve()
SLICE_SECONDS = 120.0
SKIPPED_STATUS = 77


def commit() -> str:
    """Return the commit, with "-dirty" if files other than the ledger have changed since."""
    proof = f":!{ledger.LEDGER.relative_to(Path.cwd())}"
    head = ["git", "rev-parse", "--short", "HEAD"]
    changed = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", proof]
    try:
        outputs = [
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            for command in (head, changed)
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return outputs[0] + ("-dirty" if outputs[1] else "")


def go_through(kind: str, seeds: Iterable[int], attempt: Try, seconds: float, done: Slice) -> None:
    """Try seeds for this time, at least one. `done` is correct at any moment."""
    began = time.monotonic()
    for seed in seeds:
        trial = attempt(seed)
        done.add(seed, trial)
        done.seconds = round(time.monotonic() - began, 1)
        for sentence in trial.findings:
            print(f"FOUND by {kind}, seed {seed}: {sentence}", flush=True)
        if done.seconds >= seconds:
            break
    told = ", ".join(f"{name} {n:,}" for name, n in (done.counts | done.worst).items())
    print(f"{kind}: seeds {done.first} to {done.last}, {done.seconds:.0f} s: {told}", flush=True)


def campaign(kinds: list[str], seconds: float, first: int | None) -> int:
    """Run the kinds in turn.

    Results for a seed that the caller chose are not added to the ledger.
    """
    found = 0
    with contextlib.ExitStack() as stack:
        seeds = {kind: itertools.count(first or ledger.next_seed(kind)) for kind in kinds}
        tries = {kind: stack.enter_context(KINDS[kind].trials(work_folder(kind))) for kind in kinds}
        end = time.monotonic() + seconds * len(kinds)
        for kind in itertools.cycle(kinds):
            left = min(SLICE_SECONDS, seconds, end - time.monotonic())
            if left <= 0:
                break
            seed = next(seeds[kind])
            done = Slice(kind, commit(), seed, seed - 1)
            try:
                go_through(kind, itertools.chain([seed], seeds[kind]), tries[kind], left, done)
            finally:
                found += len(done.findings)
                if first is None and done.last >= done.first:
                    ledger.append(done)
    return found


def short(kinds: list[str]) -> int:
    """Try the first seeds of each kind in a new folder, which is kept if there are findings."""
    found = 0
    for kind in kinds:
        folder = Path(tempfile.mkdtemp(prefix="short-", dir=work_folder(kind)))
        which, done = KINDS[kind], Slice(kind, "", 1, 0)
        with (which.short or which.trials)(folder) as attempt:
            go_through(kind, range(1, which.n_short + 1), attempt, float("inf"), done)
        found += len(done.findings)
        if not done.findings:
            shutil.rmtree(folder)
    return found


def replay(kind: str, seed: int) -> int:
    with KINDS[kind].trials(work_folder(kind)) as attempt:
        trial = attempt(seed)
    print(trial)
    return len(trial.findings)


def work_folder(kind: str) -> Path:
    folder = WORK / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/campaign.sh", usage="tests/campaign.sh --help tells"
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--kinds", action="store_true", dest="kinds_there_are")
    given = parser.parse_args()
    asked = given.kinds + (given.replay or [])[:1]
    unknown = [kind for kind in asked if kind not in KINDS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]}; there are: {', '.join(KINDS)}")
    return given


def end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that the kinds clean up."""
    del frame
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, end_on_signal)
    signal.signal(signal.SIGINT, end_on_signal)  # also if the caller's shell ignores it
    given = parse_arguments()
    if given.keep:
        fuzz.keep(work_folder("fuzz"))
        return 0
    if given.kinds_there_are:
        print(*KINDS, sep="\n")
        return 0
    try:
        if given.replay:
            found = replay(given.replay[0], int(given.replay[1]))
        elif given.short:
            found = short(given.kinds or list(KINDS))
        else:
            found = campaign(given.kinds or list(KINDS), given.seconds, given.seed)
    except CannotTry as error:
        print(f"campaign: cannot try {error}")
        return SKIPPED_STATUS
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
