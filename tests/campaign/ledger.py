# SPDX-License-Identifier: Apache-2.0
"""Read and write the ledger of the campaign: one line of JSON for each slice of trials."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .trial import Trial

HERE = Path(__file__).resolve().parent
LEDGER, MENDED = HERE / "ledger.jsonl", HERE / "mended.json"

#: The figures and their bounds. Figures that must be 0 count findings.
WANTED = {
    "power_images": (">=", 3000),
    "power_lost": ("<=", 0),
    "power_eio": (">=", 500),
    "kills": (">=", 10_000),
    "kills_torn": ("<=", 0),
    "kills_lost": ("<=", 0),
    "kills_litter": ("<=", 0),
    "faults": (">=", 20_000),
    "faults_wrong": ("<=", 0),
    "framework_kills": (">=", 1000),
    "framework_kills_bad": ("<=", 0),
    "crowd_storms": (">=", 1000),
    "crowd_broken": ("<=", 0),
    "fuzz_executions": (">=", 10**8),
    "fuzz_findings_open": ("<=", 0),
    "bad_files": (">=", 10**6),
    "bad_silent": ("<=", 0),
    "bad_seconds_max": ("<=", 2),
    "bad_mib_max": ("<=", 256),
}
WRONG = [name for name, wanted in WANTED.items() if wanted == ("<=", 0)]


@dataclass(frozen=True)
class Found:
    """A trial with findings. They count until an entry of mended.json has its seed."""

    seed: int
    says: list[str]
    wrong: dict[str, int]
    worst: dict[str, float]


@dataclass
class Slice:
    """Consecutive trials of one kind."""

    kind: str
    commit: str
    first: int  # first seed
    last: int
    seconds: float = 0
    counts: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    findings: list[Found] = field(default_factory=list)

    def add(self, seed: int, trial: Trial) -> None:
        wrong = {name: count for name, count in trial.counts.items() if name in WRONG and count}
        if wrong and not trial.findings:
            raise ValueError(f"{self.kind}, seed {seed}: {wrong}, and not a word about it")
        _add(self.counts, {k: v for k, v in trial.counts.items() if k not in WRONG})
        if trial.findings:
            found = Found(seed, list(trial.findings), wrong, dict(trial.worst))
            self.findings.append(found)
        else:
            _raise(self.worst, trial.worst)
        self.last = seed


def _add(sums: dict[str, int], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        sums[name] = sums.get(name, 0) + count


def _raise(most: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        most[name] = max(most.get(name, value), value)


@dataclass(frozen=True)
class Mend:
    """The fix for a finding of the trial with that seed."""

    kind: str
    seed: int
    commit: str
    says: str


def read(path: Path = LEDGER) -> list[Slice]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [_from_json(json.loads(line)) for line in lines]


def _from_json(fields: dict[str, Any]) -> Slice:
    return Slice(**fields | {"findings": [Found(**found) for found in fields["findings"]]})


def append(one: Slice, path: Path = LEDGER) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(one)) + "\n")


def read_mended(path: Path = MENDED) -> list[Mend]:
    return [Mend(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def next_seed(slices: Iterable[Slice], kind: str) -> int:
    return max((one.last for one in slices if one.kind == kind), default=0) + 1


def still_open(slices: Iterable[Slice], mended: Iterable[Mend]) -> list[tuple[str, Found]]:
    """Return the findings without a fix, with their kinds."""
    done = {(mend.kind, mend.seed) for mend in mended}
    return [
        (one.kind, found)
        for one in slices
        for found in one.findings
        if (one.kind, found.seed) not in done
    ]


def figures(slices: Sequence[Slice], mended: Sequence[Mend]) -> dict[str, float]:
    """Return all figures that were counted or measured, in the order of WANTED."""
    sums: dict[str, int] = {}
    others: dict[str, float] = {}
    for one in slices:
        _add(sums, one.counts)
        _raise(others, one.worst)
    for _, found in still_open(slices, mended):
        _add(sums, found.wrong)
        _raise(others, found.worst)
    tried = {name.partition("_")[0] for name in sums}
    sums = {name: 0 for name in WRONG if name.partition("_")[0] in tried} | sums
    return {name: (sums | others)[name] for name in WANTED if name in sums | others}
