# SPDX-License-Identifier: Apache-2.0
"""Measure what each contested mechanism is worth: run without it and compare the users' times.

A switch is a setting, an operator's command, or IOSHAPE_TEST_WITHOUT. Only a build with
-Dablation=true reads that variable; build() makes it in build/ablation. The command "tests/bench.sh
ablation --on SCENE" measures one scene.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from mounts import client_of
from striped import striped
from tree import PYTHONPATH, ROOT

from . import frameworks_small, storm
from .setting import Figure, Outcome, Setting

MIB = 1 << 20
SITE = ROOT / "build" / "ablation" / "site"
LIMIT_S = 900
#: Ratio of the times without and with a mechanism from which on the mechanism is kept.
WORTH = 1.05
AS_IT_IS = "as it is"

#: Seconds for each time that users feel. Fewer are better.
Times = dict[str, float]


@dataclass(frozen=True)
class Switch:
    """A way to disable a mechanism: environment variables, or arguments of `ioshape slots set`."""

    variables: Mapping[str, str] = field(default_factory=dict)
    operator: tuple[str, ...] = ()
    #: Python code that is put before the program of the scene small_files
    prelude: str = ""


@dataclass(frozen=True)
class Mechanism:
    name: str
    #: replacements that are compared with the mechanism, by their names
    instead: Mapping[str, Switch]
    scenes: tuple[str, ...]


def without(name: str) -> Switch:
    return Switch({"IOSHAPE_TEST_WITHOUT": name})


EACH_BY_ITSELF = """\
from ioshape._save import small
small.save = lambda *_what, **_how: False
"""


MECHANISMS = (
    Mechanism(
        "boosts by what waiting costs",
        {"fair shares": without("boosts")},
        ("three_jobs",),
    ),
    Mechanism(
        "small files pass the queue",
        {"they wait": Switch(operator=("--small", "1"))},
        ("small_beside_large",),
    ),
    Mechanism(
        "places on targets",
        {"anywhere": without("target groups")},
        ("storm_hdd1",),
    ),
    Mechanism(
        "lent memory",
        {"a copy": without("borrowing")},
        ("node",),
    ),
    Mechanism(
        "huge pages for new memory",
        {"MADV_HUGEPAGE alone": without("collapsing"), "nothing": without("fresh")},
        ("load_small_tensors", "load_large_tensors"),
    ),
    Mechanism(
        "store in memory",
        {"files in /dev/shm": Switch({"IOSHAPE_TEST_STORE": "files"})},
        ("meeting",),
    ),
    Mechanism(
        "reading ahead while objects are made",
        {"when asked": without("prefetching")},
        ("load_cold",),
    ),
    Mechanism(
        "small files synced together",
        {"each by itself": Switch(prelude=EACH_BY_ITSELF)},
        ("small_files",),
    ),
)


# ---- Scenes -------------------------------------------------------------------------------------

#: Applies the switch and measures one scene.
Measure = Callable[[Switch], Times]


@contextmanager
def variables_of(switch: Switch, address: str = "") -> Iterator[dict[str, str]]:
    """Yield an environment with no settings but the switch, and with its own coordinator."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("IOSHAPE_")}
    with tempfile.TemporaryDirectory(prefix="ioshape-bench-", dir="/dev/shm") as folder:
        yield {
            **kept,
            "IOSHAPE_TEST_BUILD": os.environ["IOSHAPE_TEST_BUILD"],
            "IOSHAPE_COORDINATOR": address or f"local:{folder}",
            "PYTHONPATH": f"{SITE}:{PYTHONPATH}",
            **switch.variables,
        }


def answer(
    variables: Mapping[str, str], given: Mapping[str, object], prefix: Sequence[str] = ()
) -> Times:
    """Return the times that a process of ablation_process.py measures."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", f"{__package__}.ablation_process", json.dumps(given)],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    found: Times = json.loads(done.stdout)
    return found


def alone(setting: Setting, switch: Switch, **given: object) -> Times:
    """Measure in one process, on the disk of the benchmark's folder."""
    with variables_of(switch) as variables:
        return answer(variables, {"path": str(setting.folder / "alone.pt"), **given})


@contextmanager
def loads(setting: Setting, *, each: int, is_cached: bool) -> Iterator[Measure]:
    alone(setting, Switch(), what="prepare", n_bytes=setting.size, each=each)
    yield partial(alone, setting, what="load", is_cached=is_cached)


@contextmanager
def small_files(setting: Setting) -> Iterator[Measure]:
    def measure(switch: Switch) -> Times:
        with variables_of(switch) as variables:
            taken = frameworks_small.save_all(
                setting, "-m", "ioshape", "run", prelude=switch.prelude, variables=variables
            )
        return {"small files": taken.seconds}

    yield measure


def times_of(found: storm.Found) -> Times:
    told = found["ways"][found["against"]]
    times = {
        "all saved": told["makespan_s"],
        "mean rank": told["mean_completion_s"],
        "training stands still": told["stall_s"],
    }
    reads = told["neighbours"]["reads"]
    return {**times, "neighbour p99": reads["p99_ms"] / 1e3} if reads else times


@contextmanager
def storms(setting: Setting) -> Iterator[Measure]:
    """Run a storm on modelled storage. Each measurement has a mount of its own."""
    del setting
    part = replace(
        storm.PARTS["hdd1"], ways=(storm.OURS,), ranks=16, n_bytes=16 * MIB, nodes=4, rounds=2
    )

    def measure(switch: Switch) -> Times:
        with (
            striped(**storm.mounted(part)) as mount,
            storm.coordinator_of(part) as address,
            variables_of(switch, address) as variables,
        ):
            return times_of(storm.run_mounted(mount, variables, part))

    yield measure


@contextmanager
def ranks_of_a_node(
    setting: Setting, *, ranks: int, n_bytes: int, parent: Path | None = None
) -> Iterator[Measure]:
    """Let ranks of one node save one file together."""
    part = storm.Part({"slow": 1}, (), ("node",), ranks, n_bytes, nodes=1, rounds=3, blind=True)

    def measure(switch: Switch) -> Times:
        with variables_of(switch) as variables:
            times = times_of(storm.run_on([parent or setting.folder], variables, part))
        return {"all saved": times["all saved"]}

    yield measure


@contextmanager
def jobs(setting: Setting, *, what: str) -> Iterator[Measure]:
    """Run several jobs on modelled spinning disks, with a Redis."""
    del setting
    part = replace(storm.PARTS["hdd"], nodes=1)

    def measure(switch: Switch) -> Times:
        with (
            striped(**storm.mounted(part)) as mount,
            storm.coordinator_of(part) as address,
            variables_of(switch, address) as variables,
        ):
            client = client_of(mount.backing)
            if switch.operator:
                operate(mount.path, variables, client, switch.operator)
            given = {"what": what, "folder": str(mount.path), "slow": part.parameters["slow"]}
            return answer(variables, given, client)

    yield measure


def operate(
    path: Path, variables: Mapping[str, str], client: Sequence[str], words: Sequence[str]
) -> None:
    """Run `ioshape slots set` on the pool of the path, as an operator would."""

    def run(*command: str | Path) -> str:
        return subprocess.run(
            [*client, sys.executable, *command],
            env=variables,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.strip()

    pool = run("-c", "import ioshape, sys; print(ioshape.probe(sys.argv[1]).pool)", path)
    run("-m", "ioshape", "slots", "set", pool, *words)


#: The scenes by name.
SCENES: dict[str, Callable[[Setting], contextlib.AbstractContextManager[Measure]]] = {
    "load_small_tensors": partial(loads, each=MIB // 2, is_cached=True),
    "load_large_tensors": partial(loads, each=64 * MIB, is_cached=True),
    "load_cold": partial(loads, each=MIB // 2, is_cached=False),
    "small_files": small_files,
    "node": partial(ranks_of_a_node, ranks=4, n_bytes=128 * MIB),
    "meeting": partial(ranks_of_a_node, parent=Path("/dev/shm"), ranks=8, n_bytes=64 << 10),
    "storm_hdd1": storms,
    "three_jobs": partial(jobs, what="three_jobs"),
    "small_beside_large": partial(jobs, what="small_beside_large"),
}


# ---- Worth of a mechanism -----------------------------------------------------------------------


@dataclass(frozen=True)
class Worth:
    """The factor by which an operation takes longer without the mechanism."""

    mechanism: str
    instead: str
    scene: str
    felt: str
    with_s: float
    without_s: float
    ratio: float
    least: float
    most: float

    @property
    def sure(self) -> float:
        """The ratio, or 1 if rounds disagree on its direction."""
        return self.ratio if self.least > 1 or self.most < 1 else 1.0


def measure_scene(setting: Setting, name: str, measure: Measure) -> list[Worth]:
    switches = {(AS_IT_IS, ""): Switch()} | {
        (mechanism.name, instead): switch
        for mechanism in MECHANISMS
        if name in mechanism.scenes
        for instead, switch in mechanism.instead.items()
    }
    taken: dict[tuple[str, str], list[Times]] = {key: [] for key in switches}
    keys = list(switches)
    for number in range(setting.rounds):
        first = number % len(keys)  # each round begins with another switch
        for key in keys[first:] + keys[:first]:
            os.sync()
            taken[key].append(measure(switches[key]))
    ours = taken.pop((AS_IT_IS, ""))
    found = []
    for (mechanism, instead), theirs in taken.items():
        for felt in ours[0]:
            ratios = [b[felt] / a[felt] for a, b in zip(ours, theirs, strict=True)]
            found.append(
                Worth(
                    *(mechanism, instead, name, felt),
                    *(median(one[felt] for one in ours), median(one[felt] for one in theirs)),
                    *(median(ratios), min(ratios), max(ratios)),
                )
            )
    return found


def build() -> None:
    """Build and install the package that heeds IOSHAPE_TEST_WITHOUT."""
    folder = SITE.parent / "build"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
            *("--no-build-isolation", "--no-deps", "--upgrade", "--target", SITE),
            *(f"--config-settings=build-dir={folder}", "."),
            "--config-settings=setup-args=-Dablation=true",
        ],
        cwd=ROOT,
        check=True,
    )


def row(worth: Worth) -> str:
    return (
        f"| {worth.instead} | {worth.scene}, {worth.felt} | {worth.with_s:.3g} | "
        f"{worth.without_s:.3g} | {worth.ratio:.2f} ({worth.least:.2f} to {worth.most:.2f}) |"
    )


def table(found: Sequence[Worth]) -> Iterator[str]:
    """Yield the lines of the table for docs/performance.md."""
    yield "| mechanism | instead | felt | with, s | without, s | ratio |"
    yield "|---|---|---|---|---|---|"
    for mechanism in MECHANISMS:
        label = mechanism.name
        for worth in found:
            if worth.mechanism == mechanism.name:
                yield f"| {label} {row(worth)}"
                label = ""


def worth_of(found: Sequence[Worth]) -> Figure:
    """Return what users lose most with the best replacement."""
    by_instead: dict[str, list[Worth]] = {}
    for one in found:
        by_instead.setdefault(one.instead, []).append(one)
    most = [max(group, key=lambda one: one.sure) for group in by_instead.values()]
    best = min(most, key=lambda one: one.sure)
    return Figure(
        f"worth_{best.mechanism.replace(' ', '_')}",
        best.sure,
        ">=",
        WORTH,
        f"{best.scene}, {best.felt}: {best.with_s:.3g} s; {best.without_s:.3g} s with "
        f"{best.instead}",
    )


def measure_scenes(setting: Setting, names: Sequence[str]) -> list[Worth]:
    build()
    found = []
    for name in names:
        setting.say(f"{name}: {setting.rounds} rounds")
        with SCENES[name](setting) as measure:
            found += measure_scene(setting, name, measure)
        for worth in found:
            if worth.scene == name:
                setting.say(f"  {worth.mechanism}: {row(worth)}")
    return found


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "each mechanism left out alone, all else alike; every measurement is a process of its own; "
        "in turns; medians of rounds, ratios of what one round took without and with it"
    )
    names = [setting.on] if setting.on else list(SCENES)
    found = measure_scenes(setting, names)
    outcome.facts["worth"] = [asdict(one) for one in found]
    measured = {one.mechanism for one in found}
    outcome.figures += [
        worth_of([one for one in found if one.mechanism == mechanism.name])
        for mechanism in MECHANISMS
        if mechanism.name in measured
    ]
    outcome.ceilings += table(found)
    return outcome
