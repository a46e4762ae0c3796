# SPDX-License-Identifier: Apache-2.0
"""Keep the ledger of the campaign: one line of JSON for each slice of trials."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .trial import Trial

LEDGER = Path(__file__).resolve().with_name("ledger.jsonl")


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
    findings: list[str] = field(default_factory=list)

    def add(self, seed: int, trial: Trial) -> None:
        for name, count in trial.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for name, value in trial.worst.items():
            self.worst[name] = max(self.worst.get(name, value), value)
        self.findings += [f"seed {seed}: {sentence}" for sentence in trial.findings]
        self.last = seed


def append(one: Slice, path: Path = LEDGER) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(one)) + "\n")


def next_seed(kind: str, path: Path = LEDGER) -> int:
    """Return the seed behind the last one of a kind in the ledger."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    slices = [json.loads(line) for line in lines]
    return max((int(one["last"]) for one in slices if one["kind"] == kind), default=0) + 1
