# SPDX-License-Identifier: Apache-2.0
"""Measure the rule that chooses engines, requests on stripes, and the in-flight controller.

The files are on stripefs and on the disk of the benchmark's folder. The controller runs on modelled
storages (depth.py).
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from striped import Mount, striped
from tree import build_folder

from . import depth
from .rounds import Sample, Samples, interleave
from .setting import Figure, Outcome, Setting

MIB = 1 << 20
LIMIT_S = 300

#: Arguments of tests/c/support/requests.c by name. With an engine alone the library chooses the
#: blocks.
STRIPED: dict[str, tuple[str, ...]] = {
    name: (name,) for name in ("uring", "uring-async", "threads", "buffered")
}
PLAIN: dict[str, tuple[str, ...]] = {
    **STRIPED,
    "uring 1M x 17": ("uring", str(MIB), "17"),
    "uring 4M x 28": ("uring", str(4 * MIB), "28"),
    "uring 16M x 8": ("uring", str(16 * MIB), "8"),
}
#: A candidate below this fraction of the fastest one is not tried a second time.
HOPELESS = 0.7

Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A mount and the candidates that are compared on it.

    Without a profile, the files are on the disk of the benchmark's folder.
    """

    profile: str | None
    parameters: dict[str, object] = field(default_factory=dict)
    n_bytes: int = 512 * MIB
    candidates: dict[str, tuple[str, ...]] = field(default_factory=lambda: STRIPED)


PARTS = {
    "hdd": Part("hdd", {"stripe_count": -1}, 256 * MIB),
    "ssd": Part("ssd", {"stripe_count": -1}),
    "ssd one by one": Part("ssd", {"stripe_count": -1, "direct": "threads"}),
    "nfs": Part("nfs", candidates=PLAIN),
    "disk": Part(None, n_bytes=1024 * MIB, candidates=PLAIN),
}

#: Layouts on which requests are counted as the process sends them and as stripefs receives them.
LAYOUTS: tuple[dict[str, object], ...] = (
    {"stripe_size": "1Mi", "stripe_count": 8},
    {"stripe_size": "3Mi", "stripe_count": 4},
    {"stripe_size": "4Mi", "stripe_count": 8},
    {"stripe_size": "16Mi", "stripe_count": 4},
    {"progressive": "4Mi:1:1Mi,64Mi:2:1Mi,eof:8:4Mi"},
    {"play": "beegfs", "stripe_size": "512Ki", "stripe_count": 4},
    {"play": "ceph", "stripe_size": "4Mi", "stripe_count": 4},
)


class FsError(Exception):
    """The helper program failed."""


def write(path: Path, n_bytes: int, *words: str) -> Found:
    """Write a file with tests/c/support/requests.c and return what that program reports."""
    done = subprocess.run(
        [build_folder() / "tests" / "c" / "requests", path, str(n_bytes), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise FsError(done.stderr)
    found: Found = json.loads(done.stdout)
    return found


def sample(path: Path, n_bytes: int, *words: str) -> Sample:
    found = write(path, n_bytes, *words)
    requests = f"{found['engine']} {found['block_bytes']} x {found['depth']}"
    return Sample(found["seconds"], n_bytes, {"choice": found["choice"], "requests": requests})


@contextmanager
def place(part: Part, folder: Path) -> Iterator[tuple[Path, Mount | None]]:
    if part.profile is None:
        yield folder / "fs-file", None
        return
    with striped(part.profile, fsname=f"bench-{os.getpid()}", **part.parameters) as mount:
        yield mount.path / "file", mount


def explore(part: Part, path: Path) -> dict[str, float]:
    """Return the GB/s of each candidate, the better of two tries; slow candidates get one try."""
    rates: dict[str, float] = {}
    for _ in range(2):
        for name, words in part.candidates.items():
            if rates.get(name, 1e9) < HOPELESS * max(rates.values(), default=0):
                continue
            rate = sample(path, part.n_bytes, *words).gb_per_s
            rates[name] = max(rates.get(name, 0), rate)
    return rates


@contextmanager
def counting(mount: Mount | None, counted: Counter[str]) -> Iterator[None]:
    """Count the writes that the filesystem sees in this block.

    Other engines are not counted: they use the page cache, which splits writes arbitrarily.
    """
    if mount:
        mount.reset()
    yield
    if mount:
        counted.update(mount.statistics()["writes"])


def ratio(samples: Samples, striped_file: bool) -> float:
    """Return the median ratio of ioshape's speed to the best candidate's.

    If both use equal requests on a plain file the ratio is 1, because only noise would be measured.
    """
    both = {str(one.details["requests"]) for found in samples.values() for one in found}
    if len(both) == 1 and not striped_file:
        return 1.0
    pairs = zip(samples["ours"], samples["best"], strict=True)
    return median(mine.gb_per_s / other.gb_per_s for mine, other in pairs)


def run(part: Part, folder: Path, rounds: int) -> Found:
    with place(part, folder) as (path, mount):
        writes: Counter[str] = Counter()
        rates = explore(part, path)
        best = max(rates, key=lambda name: rates[name])

        def ours() -> Sample:
            with counting(mount, writes):
                return sample(path, part.n_bytes, "auto")

        contestants = {
            "ours": ours,
            "best": lambda: sample(path, part.n_bytes, *part.candidates[best]),
        }
        samples = interleave(contestants, rounds, lambda: None)
        path.unlink()
        statistics = mount.statistics() if mount else {}
    choice = str(samples["ours"][0].details["choice"])
    return {
        "choice": choice,
        "candidates_gb_per_s": rates,
        "best": best,
        "ratio": ratio(samples, "stripes of" in choice),
        "samples": samples,
        "writes": dict(writes),
        "model": {"profile": part.profile, **part.parameters, **statistics.get("parameters", {})},
    }


def count_requests(layout: dict[str, object]) -> Found:
    with striped("ssd", bandwidth="20G", seek_ms=0, **layout) as mount:
        left = write(mount.path / "file", 200 * MIB + 777)
        arrived = mount.statistics()["writes"]
    return {"layout": layout, "left": left, "arrived": arrived}


def crossings(counted: list[Found], parts: dict[str, Found]) -> tuple[int, int]:
    """Return how many write requests cross stripes or begin off a stripe, and the number of all."""
    told = [one[side] for one in counted for side in ("left", "arrived")]
    told += [found["writes"] for found in parts.values() if found["writes"]]
    bad = sum(one["crossing"] + one["off_stripe"] for one in told)
    return bad, sum(one["requests"] for one in told)


def figures(parts: dict[str, Found], counted: list[Found]) -> list[Figure]:
    worst = min(parts, key=lambda name: float(parts[name]["ratio"]))
    ratios = ", ".join(
        f"{name} {found['ratio']:.2f} ({found['choice']}; best {found['best']})"
        for name, found in parts.items()
    )
    result = [Figure("engine_vs_best", float(parts[worst]["ratio"]), ">=", 0.95, ratios)]
    bad, all_of_them = crossings(counted, parts)
    result.append(
        Figure(
            "stripe_crossings",
            bad,
            "<=",
            0,
            f"of {all_of_them} write requests, as they leave and as stripefs sees them, on "
            f"{len(counted)} layouts and in the runs above",
        )
    )
    return result


def sentence(name: str, found: Found) -> str:
    """Return a line about the model and the speeds on it, for the reader of the results."""
    rates = ", ".join(f"{key} {value:.2f}" for key, value in found["candidates_gb_per_s"].items())
    model = ", ".join(f"{key} {value}" for key, value in found["model"].items())
    return f"{name} ({model}), GB/s: {rates}"


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    parts: dict[str, Found] = {}
    for name, part in PARTS.items():
        setting.say(name)
        parts[name] = run(part, setting.folder, setting.rounds)
        outcome.samples[name] = parts[name]["samples"]
        outcome.ceilings.append(sentence(name, parts[name]))
    counted = [count_requests(layout) for layout in LAYOUTS]
    outcome.figures = figures(parts, counted)
    setting.say("depth")
    modelled, outcome.facts["depth"] = depth.measure()
    outcome.figures += modelled
    outcome.facts["method"] = (
        "files written by tests/requests: engines in turns, the best of them against the rule's; "
        "stripefs is a filesystem in user space that answers requests when its model says"
    )
    outcome.facts["requests"] = counted
    for name, found in parts.items():
        outcome.facts[name] = {key: value for key, value in found.items() if key != "samples"}
    return outcome
