# SPDX-License-Identifier: Apache-2.0
"""Measure a checkpoint storm on modelled slow filesystems, with the engine of "ioshape bench".

With names of parts or of kinds of clusters, the command runs and draws these alone. With "validate"
it checks the model of stripefs. The package must be importable, and stripefs must be built.

    python -m tests.bench.storm hdd cephfs --rounds 1 --plot .
    python -m tests.bench.storm validate
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from clusters import IN_MACHINE, TESTBED, Cluster, running
from coordinators import coordinator
from mounts import client_of
from striped import Mount, striped
from stripefs_model import TOLERANCE, validate

from .rounds import Sample
from .setting import Figure, Outcome, Setting

MIB = 1 << 20
LIMIT_S = 1800

# In the figures "ours" is this way: each rank saves its own file in the background, in its turn.
OURS, THEIRS = "async", "torch"

Found = dict[str, Any]


class StormError(Exception):
    """The storm could not be measured."""


# ---- Figures -----------------------------------------------------------------------------------


def seconds(found: Found, way: str, name: str) -> float:
    return float(found["ways"][way][name])


def least_s(found: Found) -> float:
    """Return the least time that the targets need for all bytes."""
    model = found["model"]
    rate = float(model["targets"]) * float(model["bandwidth"])
    return float(found["ranks"]) * float(found["bytes"]) / rate


def reads_p99_ms(found: Found, way: str) -> float:
    return float(found["ways"][way]["neighbours"]["reads"]["p99_ms"])


@dataclass(frozen=True)
class Makespan:
    """A figure of the time until all ranks have saved.

    With ">=" it is theirs divided by ours, with "<=" ours divided by theirs.
    """

    relation: Literal[">=", "<="]
    target: float

    def __call__(self, name: str, found: Found) -> Figure:
        ours, theirs = (seconds(found, way, "makespan_s") for way in (OURS, THEIRS))
        ratio = theirs / ours if self.relation == ">=" else ours / theirs
        remark = f"torch.save {theirs:.2f} s, ours {ours:.2f} s, at least {least_s(found):.2f} s"
        return Figure(f"{name}_makespan", ratio, self.relation, self.target, remark)


@dataclass(frozen=True)
class NeighbourP99:
    """A figure of the 99th percentile of a neighbour's small reads."""

    target: float

    def __call__(self, name: str, found: Found) -> Figure:
        ours, theirs = (reads_p99_ms(found, way) for way in (OURS, THEIRS))
        counts = [found["ways"][way]["neighbours"]["reads"]["count"] for way in (OURS, THEIRS)]
        alone = found["alone"]["reads"]["p99_ms"]
        return Figure(
            f"{name}_neighbour_p99",
            theirs / ours,
            ">=",
            self.target,
            f"p99 of small reads beside torch.save {theirs:.0f} ms ({counts[1]} reads), beside "
            f"ours {ours:.1f} ms ({counts[0]}), alone {alone:.1f} ms",
        )


def mean_completion(name: str, found: Found) -> Figure:
    ours, theirs = (seconds(found, way, "mean_completion_s") for way in (OURS, THEIRS))
    remark = f"torch.save {theirs:.2f} s, ours {ours:.2f} s"
    return Figure(f"{name}_mean_completion", theirs / ours, ">=", 2.2, remark)


def stall(name: str, found: Found) -> Figure:
    mine, other = (seconds(found, way, "stall_s") for way in (OURS, THEIRS))
    most = seconds(found, OURS, "most_stall_s")
    return Figure(
        f"{name}_stall",
        mine / other,
        "<=",
        0.05,
        f"mean of the ranks, save_async {mine * 1e3:.0f} ms, torch.save {other * 1e3:.0f} ms; "
        f"the rank that is held longest {most * 1e3:.0f} ms",
    )


def requests(name: str, found: Found) -> Figure | None:
    """Return how many requests a file takes, or None if the kind of cluster does not count them."""
    counts = {way: found["ways"][way].get("metadata") for way in (OURS, THEIRS)}
    if not counts[OURS]:
        return None
    ours, theirs = (sum(counts[way].values()) / found["ranks"] for way in (OURS, THEIRS))
    kinds = sorted(counts[OURS], key=counts[OURS].__getitem__, reverse=True)
    text = ", ".join(f"{kind} {counts[OURS][kind] / found['ranks']:.1f}" for kind in kinds[:6])
    return Figure(
        f"{name}_requests",
        theirs / ours,
        ">=",
        0.5,
        f"requests but reads and writes for each file, torch.save {theirs:.1f}, ours {ours:.1f}: "
        f"{text}",
    )


def utilisation(name: str, found: Found) -> Figure:
    used = least_s(found) / seconds(found, OURS, "makespan_s")
    other = least_s(found) / seconds(found, THEIRS, "makespan_s")
    remark = f"share of the makespan that the bytes alone would take; torch.save {other:.2f}"
    return Figure(f"{name}_utilisation", used, ">=", 0.9, remark)


def operations(name: str, found: Found) -> Figure:
    ours, theirs = (found["ways"][way]["metadata"] for way in ("node", THEIRS))
    text = ", ".join(f"{name} {count}" for name, count in ours.items())
    return Figure(
        f"{name}_ratio",
        sum(theirs.values()) / sum(ours.values()),
        ">=",
        6,
        f"torch.save {sum(theirs.values())}, save_group {sum(ours.values())}: {text}",
    )


def first_operations(name: str, found: Found) -> Figure:
    ours, theirs = (found["ways"][way]["metadata"] for way in (OURS, THEIRS))
    text = ", ".join(f"{name} {count}" for name, count in ours.items())
    return Figure(
        name,
        sum(ours.values()) / sum(theirs.values()),
        "<=",
        1.5,
        f"first saves of all processes, torch.save {sum(theirs.values())} requests, "
        f"ours {sum(ours.values())}: {text}",
    )


# ---- Parts of the benchmark ---------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A modelled storage, and the storm on it."""

    parameters: dict[str, object]
    figures: tuple[Callable[[str, Found], Figure | None], ...]
    ways: tuple[str, ...] = (THEIRS, OURS)
    ranks: int = 32
    n_bytes: int = 32 * MIB
    #: number of nodes; each has its own mount, and the neighbours have another one
    nodes: int = 8
    #: number of rounds at most; 0: count metadata operations and measure no time
    rounds: int = 2
    #: count the operations of the first save of each process, and not of its second
    first: bool = False
    #: the storage has no known layout, ioshape has no settings, and there is no Redis
    blind: bool = False


# These lists are complete as far as the model matters, because the results show them. Other values
# are defaults of stripefs.
MODEL: dict[str, object] = {"targets": 8, "run": "16Mi", "stripe_size": "1Mi"}
HDD = {**MODEL, "bandwidth": 60_000_000, "seek_ms": 8, "slow": 4}
SSD = {**MODEL, "bandwidth": 250_000_000, "seek_ms": 0.05, "slow": 16}
#: Bytes of each process leave in whole stripes, several at a time, as from Lustre's client.
LUSTRE: dict[str, object] = {"play": "lustre", "cache": "client"}
#: A plain FUSE mount that reveals nothing about its storage, and whose kernel caches no writes.
BLIND: dict[str, object] = {"play": "nfs", "cache": "through"}
#: The same with a client for each rank that answers writes at once and sends them later.
BLIND_MANY: dict[str, object] = {"play": "nfs", "cache": "client"}


def blind(parameters: dict[str, object], *figures: Callable[[str, Found], Figure | None]) -> Part:
    return Part({**parameters, **BLIND}, figures, nodes=1, blind=True)


def blind_many(
    parameters: dict[str, object], *figures: Callable[[str, Found], Figure | None]
) -> Part:
    return Part({**parameters, **BLIND_MANY}, figures, nodes=32, blind=True)


PARTS = {
    "hdd": Part(
        {**HDD, **LUSTRE, "stripe_count": -1},
        (Makespan(">=", 1.25), mean_completion, NeighbourP99(10), stall),
    ),
    "hdd1": Part({**HDD, **LUSTRE, "stripe_count": 1}, (Makespan(">=", 1.0), NeighbourP99(8))),
    "ssd": Part(
        {**SSD, **LUSTRE, "stripe_count": -1},
        (Makespan("<=", 0.9), NeighbourP99(8)),
        rounds=3,
    ),
    "blind_hdd": blind({**HDD, "stripe_count": -1}, Makespan(">=", 1.5), NeighbourP99(2)),
    "blind_hdd1": blind({**HDD, "stripe_count": 1}, Makespan(">=", 1.0), NeighbourP99(2)),
    "blind_ssd": blind({**SSD, "stripe_count": -1}, Makespan(">=", 1.0), NeighbourP99(2)),
    "blindmany_hdd": blind_many(
        {**HDD, "stripe_count": -1}, Makespan(">=", 1.0), NeighbourP99(6), utilisation
    ),
    "blindmany_hdd1": blind_many(
        {**HDD, "stripe_count": 1}, Makespan(">=", 1.0), NeighbourP99(6), utilisation
    ),
    "blindmany_ssd": blind_many(
        {**SSD, "stripe_count": -1}, Makespan(">=", 1.0), NeighbourP99(6), utilisation
    ),
    "blindmany_metadata": replace(
        blind_many({**SSD, "stripe_count": -1, "slow": 1}, first_operations),
        n_bytes=4 * MIB,
        rounds=0,
        first=True,
    ),
    "metadata": Part(
        {**SSD, **LUSTRE, "stripe_count": -1, "slow": 1},
        (operations,),
        ways=(THEIRS, "node", OURS),
        ranks=64,
        n_bytes=4 * MIB,
        rounds=0,
    ),
}


@contextmanager
def own_environment(part: Part, memory: str = "/dev/shm") -> Iterator[dict[str, str]]:
    """Yield variables with a coordinator that no other program uses."""
    with (
        tempfile.TemporaryDirectory(prefix="ioshape-bench-", dir=memory) as folder,
        coordinator_of(part) as address,
    ):
        # Without Redis the library uses local slots. These are in a folder of their own.
        own = {"IOSHAPE_COORDINATOR": address or f"local:{folder}"}
        yield {**own, **os.environ}


@contextmanager
def coordinator_of(part: Part) -> Iterator[str]:
    """Yield the address of a Redis, or "" if the part has none.

    Ranks of several nodes meet at a Redis, as in a cluster that has one.
    """
    if part.blind:
        yield ""
        return
    with coordinator("redis") as address:
        yield address


def mounted(part: Part) -> dict[str, Any]:
    """Return the arguments of stripefs.

    Pools are named after filesystems, so the name is unique.
    """
    return {"clients": part.nodes + 1, "fsname": f"mgs@tcp:/bench-{os.getpid()}", **part.parameters}


def run(part: Part, picture: str = "") -> Found:
    """Run a part and return its results and its model."""
    with (
        striped(**mounted(part)) as mount,
        own_environment(part) as variables,
    ):
        found = run_mounted(mount, variables, part, picture)
        found["model"] = part.parameters
        found["counted"] = counted(mount)
    return found


def run_mounted(mount: Mount, variables: dict[str, str], part: Part, picture: str = "") -> Found:
    """Run a part on a mounted stripefs."""
    return run_on(
        mount.paths,
        variables,
        part,
        counter=str(mount.backing),
        picture=picture,
        prefix=[] if part.blind else client_of(mount.backing),
    )


def run_on(
    mounts: Sequence[Path],
    variables: dict[str, str],
    part: Part,
    *,
    counter: str | list[str] = "",
    picture: str = "",
    prefix: Sequence[str] = (),
) -> Found:
    """Run a part on these mounts, one for each node and the last one for the neighbours."""
    given = {
        "mounts": [str(path) for path in mounts],
        "counter": counter,
        "picture": picture,
        "plan": {
            "ranks": part.ranks,
            "n_bytes": part.n_bytes,
            "ways": part.ways,
            "rounds": part.rounds,
        },
        "slow": part.parameters["slow"],
        "first": part.first,
    }
    done = subprocess.run(
        [
            *prefix,
            *(sys.executable, "-m", f"{__package__}.storm_process", json.dumps(given)),
        ],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise StormError(f"the storm ended with exit code {done.returncode}")
    found: Found = json.loads(done.stdout)
    found["nodes"] = part.nodes
    return found


# Each target of a cluster has the speed of a spinning disk: two cores keep up with four of them.
TARGETS = {"targets": 4, "mb_per_s": 60, "ms_per_seek": 8}
#: Kinds of clusters whose requests tests/testbed/requests.sh can count.
COUNTED = ("cephfs", "glusterfs", "nfs3", "nfs4.1", "nfs4.2")
#: The storm on such a cluster, without any settings of ioshape.
CLUSTER = Part(
    {"slow": 1, "targets": 4, "bandwidth": 60_000_000},
    (Makespan(">=", 0.95), mean_completion, stall, NeighbourP99(3), requests),
    ranks=16,
    nodes=2,
    rounds=5,
    blind=True,
)


def mounts_of(cluster: Cluster, part: Part, clients: ExitStack) -> list[Path]:
    """Return the mounts: the last one is for the neighbours, the others are for the nodes."""
    more = [clients.enter_context(cluster.client()) for _ in range(part.nodes)]
    return [cluster.path, *more]


def targets(kind: str) -> dict[str, int]:
    """Return the options of up.sh. An NFS server has one disk."""
    return {**TARGETS, "targets": 1} if kind.startswith("nfs") else TARGETS


def run_on_cluster(kind: str, part: Part, picture: str = "") -> Found:
    """Run a storm on a real filesystem."""
    with (
        running(kind, **targets(kind)) as cluster,
        ExitStack() as clients,
        # A machine (User-mode Linux) has its own /dev/shm. Its files elsewhere stay in its memory,
        # too.
        own_environment(part, "/tmp" if cluster.prefix else "/dev/shm") as variables,
    ):
        mounts = mounts_of(cluster, part, clients)
        found = run_on(mounts, variables, part, picture=picture, prefix=cluster.prefix)
        found["model"] = {**part.parameters, "targets": targets(kind)["targets"]}
        if kind in COUNTED and OURS in part.ways and THEIRS in part.ways:
            second = run_on(
                *(mounts, variables, replace(part, rounds=0, n_bytes=4 * MIB)),
                counter=[f"{TESTBED}/requests.sh", str(cluster.path)],
                prefix=cluster.prefix,
            )
            for way, counted in second["ways"].items():
                found["ways"][way] |= counted
    return found


def counted(mount: Mount) -> Found:
    """Return counts of all that happened on the mount."""
    statistics = mount.statistics()
    return {
        "writes": statistics["writes"],
        "seeks": sum(target["seeks"] for target in statistics["targets"]),
    }


# ---- All parts ----------------------------------------------------------------------------------


def sentence(name: str, part: Part) -> str:
    """Return a line about the model, for the reader of the results."""
    text = ", ".join(f"{key} {value}" for key, value in part.parameters.items())
    return (
        f"{name}: {part.ranks} ranks on {part.nodes} nodes x {part.n_bytes // MIB} MiB on "
        f"stripefs: {text}"
    )


def model_error(say: Callable[[str], None]) -> Figure:
    """Return the worst error of the model, on which all other figures rely."""
    worst = None
    for slow, scale in ((4, 2), (16, 1)):
        for check in validate(slow, scale):
            say(
                f"time factor {slow}: {check.name}: {check.expected_s:.3f} s by its parameters, "
                f"{check.measured_s:.3f} s measured"
            )
            worst = check if worst is None or check.error > worst.error else worst
    assert worst is not None
    remark = f"{worst.name}: {worst.expected_s:.3f} s expected, {worst.measured_s:.3f} s measured"
    return Figure("model_error", worst.error, "<=", TOLERANCE, remark)


def add(outcome: Outcome, name: str, part: Part, found: Found) -> None:
    outcome.figures += filter(None, (figure(name, found) for figure in part.figures))
    outcome.facts[name] = found
    outcome.samples[name] = {
        way: [Sample(one["makespan_s"], part.ranks * part.n_bytes) for one in told["rounds"]]
        for way, told in found["ways"].items()
        if part.rounds
    }


def measure_on_cluster(kind: str, setting: Setting) -> Outcome:
    outcome = Outcome()
    part = replace(CLUSTER, rounds=min(CLUSTER.rounds, setting.rounds))
    outcome.facts["method"] = (
        "the engine of ioshape bench on a cluster of tests/testbed, all servers and clients on "
        "this host, storage targets slowed down by the kernel; nothing configured; ways in turns, "
        "after a storm that does not count; medians of rounds, latencies of all rounds together"
    )
    if kind in IN_MACHINE:
        outcome.facts["clients"] = "the Linux kernel's, in User-mode Linux with one processor"
    setting.say(f"{kind}: {part.ranks} ranks on {part.nodes} nodes x {part.n_bytes // MIB} MiB")
    add(outcome, kind, part, run_on_cluster(kind, part))
    text = ", ".join(f"{name} {value}" for name, value in targets(kind).items())
    outcome.ceilings.append(f"{kind}: {text}")
    return outcome


def measure(setting: Setting) -> Outcome:
    if setting.on:
        return measure_on_cluster(setting.on, setting)
    outcome = Outcome()
    outcome.facts["method"] = (
        "the engine of ioshape bench on stripefs, a filesystem in user space that answers "
        "requests when its model says, several times slower than the clock; ways in turns, after "
        "a storm that does not count; medians of rounds, latencies of all rounds together"
    )
    setting.say("the model")
    outcome.figures.append(model_error(lambda text: setting.say(f"  {text}")))
    for name, part in PARTS.items():
        setting.say(name)
        found = run(replace(part, rounds=min(part.rounds, setting.rounds)))
        add(outcome, name, part, found)
        outcome.ceilings.append(sentence(name, part))
    return outcome


def main() -> int:
    """Run parts of the benchmark alone, with pictures, or check the model."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.storm")
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=None, metavar="FOLDER")
    given = parser.parse_args()
    if given.parts == ["validate"]:
        found = model_error(print)
        print(f"{found.name} {found.value:.3f}, {found.remark}")
        return 0 if found.met else 1
    for name in given.parts:
        part = PARTS.get(name, CLUSTER)
        part = replace(part, rounds=min(part.rounds, given.rounds))
        picture = str(given.plot / f"{name}.svg") if given.plot else ""
        told = run(part, picture) if name in PARTS else run_on_cluster(name, part, picture)
        print(json.dumps(told, indent=1), flush=True)
        for one in filter(None, (figure(name, told) for figure in part.figures)):
            print(f"{one.name} {one.value:.2f} ({one.relation} {one.target}): {one.remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
