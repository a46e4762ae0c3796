# SPDX-License-Identifier: Apache-2.0
"""A checkpoint storm on filesystems that are slow by rule: the engine of "ioshape bench" on
stripefs.

    python -m tests.bench.storm hdd --rounds 2 --plot .

runs parts of it alone, and draws them. The package must be importable, and stripefs built.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from coordinators import coordinator
from striped import Mount, striped

from .rounds import Sample
from .setting import Figure, Outcome, Setting

MIB = 1 << 20
LIMIT_S = 1800

# What "ours" is in the figures: each rank its own file, in its turn, in the background.
OURS, THEIRS = "async", "torch"


@dataclass(frozen=True)
class Part:
    """One mount, and a storm on it."""

    profile: str
    ways: tuple[str, ...]
    parameters: dict[str, object] = field(default_factory=dict)
    ranks: int = 32
    n_bytes: int = 32 * MIB
    nodes: int = 1
    #: 0: as many as are asked for
    rounds: int = 0
    coordinator: Literal["local", "redis"] = "local"


# All that matters is said, so that it stands in the results; the rest is stripefs's own.
MODEL: dict[str, object] = {"targets": 8, "run": "16Mi", "stripe_size": "1Mi", "cache": "client"}
HDD = {**MODEL, "bandwidth": "60M", "seek_ms": 8}
SSD = {**MODEL, "bandwidth": "250M", "seek_ms": 0.05}

PARTS = {
    "hdd": Part("hdd", (THEIRS, OURS, "save", "node"), {**HDD, "stripe_count": -1}),
    "hdd1": Part("hdd", (THEIRS, OURS), {**HDD, "stripe_count": 1}),
    "ssd": Part("ssd", (THEIRS, OURS, "save", "node"), {**SSD, "stripe_count": -1}),
    # Ranks of several nodes meet at a Redis, as they do in a cluster that has one.
    "metadata": Part(
        "ssd",
        (THEIRS, "node", OURS),
        {**SSD, "stripe_count": -1},
        ranks=64,
        n_bytes=4 * MIB,
        nodes=8,
        rounds=1,
        coordinator="redis",
    ),
}

Found = dict[str, Any]


class StormError(Exception):
    """It could not be measured."""


@contextmanager
def own_environment(part: Part) -> Iterator[dict[str, str]]:
    """A coordinator whose slots nobody else takes, and no memory of other mounts."""
    with tempfile.TemporaryDirectory(prefix="ioshape-bench-", dir="/dev/shm") as folder:
        variables = {**os.environ, "XDG_CACHE_HOME": folder}
        if part.coordinator == "redis":
            with coordinator("redis") as address:
                yield {"IOSHAPE_COORDINATOR": address, **variables}
        else:
            yield {"IOSHAPE_COORDINATOR": f"local:{folder}", **variables}


def run(part: Part, rounds: int, picture: str = "") -> Found:
    """What the process finds, and what it was found on."""
    with (
        striped(part.profile, **part.parameters) as mount,
        own_environment(part) as variables,
    ):
        # As the first large save of a job would: files of these sizes are too small for a trial.
        subprocess.run(
            [sys.executable, "-m", "ioshape", "probe", "--calibrate", str(mount.path)],
            env=variables,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        plan = {
            "ranks": part.ranks,
            "n_bytes": part.n_bytes,
            "ways": part.ways,
            "rounds": part.rounds or rounds,
            "nodes": part.nodes,
        }
        program = [sys.executable, "-m", f"{__package__}.storm_process"]
        done = subprocess.run(
            [*program, str(mount.path), str(mount.backing), json.dumps(plan), picture],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise StormError(f"the storm on {part.profile} ended with exit code {done.returncode}")
        found: Found = json.loads(done.stdout)
        found["model"] = {"profile": part.profile, **part.parameters}
        found["counted"] = counted(mount)
    return found


def counted(mount: Mount) -> Found:
    """Of all that was measured there."""
    statistics = mount.statistics()
    return {
        "writes": statistics["writes"],
        "seeks": sum(target["seeks"] for target in statistics["targets"]),
    }


# ---- Figures -----------------------------------------------------------------------------------


def seconds(found: Found, way: str, name: str) -> float:
    return float(found["ways"][way][name])


def reads_p99_ms(found: Found, way: str) -> float:
    return float(found["ways"][way]["neighbours"]["reads"]["p99_ms"])


def makespan(found: Found, name: str, relation: Literal[">=", "<="], target: float) -> Figure:
    """ ">=": theirs to ours; "<=": ours to theirs."""
    ours, theirs = (seconds(found, way, "makespan_s") for way in (OURS, THEIRS))
    ratio = theirs / ours if relation == ">=" else ours / theirs
    return Figure(name, ratio, relation, target, f"torch.save {theirs:.2f} s, ours {ours:.2f} s")


def neighbour(found: Found, name: str, target: float) -> Figure:
    ours, theirs = (reads_p99_ms(found, way) for way in (OURS, THEIRS))
    counts = [found["ways"][way]["neighbours"]["reads"]["count"] for way in (OURS, THEIRS)]
    alone = found["alone"]["reads"]["p99_ms"]
    return Figure(
        name,
        theirs / ours,
        ">=",
        target,
        f"p99 of small reads beside torch.save {theirs:.0f} ms ({counts[1]} reads), beside ours "
        f"{ours:.1f} ms ({counts[0]}), alone {alone:.1f} ms",
    )


def hdd_figures(found: Found) -> list[Figure]:
    ours, theirs = (seconds(found, way, "mean_completion_s") for way in (OURS, THEIRS))
    mine, other = (seconds(found, way, "stall_s") for way in (OURS, THEIRS))
    most = seconds(found, OURS, "most_stall_s")
    return [
        makespan(found, "hdd_makespan", ">=", 1.3),
        Figure(
            "hdd_mean_completion",
            theirs / ours,
            ">=",
            2.2,
            f"torch.save {theirs:.2f} s, ours {ours:.2f} s",
        ),
        neighbour(found, "hdd_neighbour_p99", 8),
        Figure(
            "hdd_stall",
            mine / other,
            "<=",
            0.05,
            f"mean of the ranks, save_async {mine * 1e3:.0f} ms, torch.save {other * 1e3:.0f} ms; "
            f"the rank that is held longest {most * 1e3:.0f} ms",
        ),
    ]


def hdd1_figures(found: Found) -> list[Figure]:
    return [
        makespan(found, "hdd1_makespan", ">=", 0.95),
        neighbour(found, "hdd1_neighbour_p99", 8),
    ]


def ssd_figures(found: Found) -> list[Figure]:
    return [
        makespan(found, "ssd_makespan", "<=", 1.0),
        neighbour(found, "ssd_neighbour_p99", 10),
    ]


def metadata_figures(found: Found) -> list[Figure]:
    ours, theirs = (found["ways"][way]["metadata"] for way in ("node", THEIRS))
    text = ", ".join(f"{name} {count}" for name, count in ours.items())
    return [
        Figure(
            "metadata_ratio",
            sum(theirs.values()) / sum(ours.values()),
            ">=",
            5,
            f"torch.save {sum(theirs.values())}, save_group {sum(ours.values())}: {text}",
        )
    ]


FIGURES = {
    "hdd": hdd_figures,
    "hdd1": hdd1_figures,
    "ssd": ssd_figures,
    "metadata": metadata_figures,
}


def sentence(name: str, found: Found) -> str:
    """The model, for those who read the table."""
    text = ", ".join(f"{key} {value}" for key, value in found["model"].items())
    return f"{name}: {found['ranks']} ranks x {found['bytes'] // MIB} MiB on stripefs: {text}"


def add(outcome: Outcome, name: str, found: Found) -> None:
    outcome.figures += FIGURES[name](found)
    outcome.facts[name] = found
    outcome.ceilings.append(sentence(name, found))
    total = float(found["ranks"] * found["bytes"])
    outcome.samples[name] = {
        way: [Sample(one["makespan_s"], total) for one in told["rounds"]]
        for way, told in found["ways"].items()
    }


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "the engine of ioshape bench on stripefs, a filesystem in user space that answers "
        "requests when its model says; ways in turns, medians of rounds, latencies of all rounds "
        "together"
    )
    for name, part in PARTS.items():
        setting.say(f"{name}: {part.ranks} ranks, {setting.rounds} rounds")
        add(outcome, name, run(part, setting.rounds))
    return outcome


def main() -> None:
    """Parts alone, with pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.storm")
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=Path(), metavar="FOLDER")
    given = parser.parse_args()
    for name in given.parts:
        found = run(PARTS[name], given.rounds, str(given.plot / f"{name}.svg"))
        print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
