# SPDX-License-Identifier: Apache-2.0
"""Measure saves to the node's disk that are drained to a slow filesystem, and their neighbours.

The disk is that of --dir. The destination is stripefs with spinning disks, as in "storm".
"""

import json
import mmap
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median, quantiles
from typing import Any

from mounts import client_of
from striped import striped

from . import fio, storm
from .rounds import Sample, Samples, fastest
from .setting import Figure, Outcome, Setting, speed_figure

MIB = 1 << 20
OURS = "ioshape"

PAUSE_S = 2.0
ROUNDS_OF_MANY = 2  # each takes a minute or two

MANY = storm.PARTS["hdd"]
#: One node's share of disks that many nodes use. Its clock is not slowed: the node's disk is real.
SHARE: dict[str, object] = {**MANY.parameters, "targets": 2, "slow": 1}
ONE = replace(MANY, parameters=SHARE, ranks=1, nodes=1, n_bytes=256 * MIB)

Found = dict[str, Any]


# ---- The disk -----------------------------------------------------------------------------------


def near_samples(setting: Setting) -> Samples:
    """Compare durable saves to the tier, with its journal, with direct writes by fio."""
    import ioshape  # noqa: PLC0415 - imports torch, which other benchmarks do not need
    import torch  # noqa: PLC0415
    from ioshape._core.context import Context  # noqa: PLC0415
    from ioshape._tier.tier import Tier  # noqa: PLC0415

    ioshape.configure(examine="off")  # the same state is saved again and again
    memory = mmap.mmap(-1, setting.size)
    memory.madvise(mmap.MADV_HUGEPAGE)  # as fio's memory is
    state = {"weight": torch.frombuffer(memory, dtype=torch.uint8).random_()}
    near, file = setting.folder / "near", setting.folder / "fio"
    path = str(setting.folder / "destination" / "model.pt")
    opened: list[Tier] = []

    def begin_anew() -> None:
        while opened:
            opened.pop().close()
        setting.settle()
        near.mkdir()
        opened.append(Tier(Context(), str(near)))
        opened[0].path_for(path, 0)  # makes the directories, which stay for all saves

    def save() -> Sample:
        (tier,) = opened
        begin = time.perf_counter()
        ioshape.save(state, tier.path_for(path, setting.size))
        tier.keep(path)
        return Sample(time.perf_counter() - begin, setting.size)

    setting.say("fio's settings")
    fios, _ = fio.calibrate("write", file, setting.size, setting.settle)
    setting.say("saves on the tier")
    begin_anew()
    save()  # does what is done only once
    samples = setting.compare({OURS: save, **fios}, setting.rounds, begin_anew)
    opened.pop().close()
    return samples


def near_figure(samples: Samples) -> Figure:
    best = fastest(samples, [name for name in samples if name != OURS])
    return speed_figure("tier_save_vs_fio", 0.92, samples, OURS, best)


# ---- The slow filesystem ------------------------------------------------------------------------


def run_on_disks(setting: Setting, what: str, part: storm.Part, rounds: int) -> Found:
    """Run tier_process.py on stripefs and return its results."""
    with striped(**storm.mounted(part)) as mount, storm.own_environment(part) as variables:
        given = {
            "mounts": [str(path) for path in mount.paths],
            "near": str(setting.folder / what),
            "n_bytes": part.n_bytes,
            "rounds": rounds,
            "pause_s": PAUSE_S,
            "slow": part.parameters["slow"],
        }
        process = [sys.executable, "-m", f"{__package__}.tier_process", what, json.dumps(given)]
        done = subprocess.run(
            [*client_of(mount.backing), *process],
            env=variables | {"IOSHAPE_EXAMINE": "off"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=storm.LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise storm.StormError(f"saves over tiers ended with exit code {done.returncode}")
    found: Found = json.loads(done.stdout)
    return found


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(one[name] for one in samples) for name in samples[0]}


def one_node_figures(found: Found) -> list[Figure]:
    stall, restart = medians(found["stalls"]), medians(found["restarts"])
    carry = medians(found["carries"])
    best = min((name for name in carry if name != "drain"), key=lambda name: carry[name])

    def ratio(name: str, ours: str, theirs: str) -> float:
        return float(median(one[ours] / one[theirs] for one in found[name]))

    text = ", ".join(f"{name} {took:.2f} s" for name, took in carry.items())
    return [
        Figure(
            "tier_stall_vs_direct",
            ratio("stalls", "tier", "direct"),
            "<=",
            0.3,
            f"of {len(found['stalls'])} trainings: over the tier {stall['tier']:.2f} s, direct "
            f"{stall['direct']:.2f} s",
        ),
        Figure(
            "tier_drain_vs_destination",
            ratio("carries", best, "drain"),
            ">=",
            0.9,
            f"{ONE.n_bytes // MIB} MiB: {text}",
        ),
        Figure(
            "tier_restart_ratio",
            ratio("restarts", "tier", "destination"),
            "<=",
            0.2,
            f"from the tier {restart['tier']:.2f} s, from the destination "
            f"{restart['destination']:.2f} s, both with cold caches",
        ),
    ]


def p99_ms(rounds: list[Found]) -> float:
    took_ns: list[float] = [took for one in rounds for took in one["reads_ns"]]
    return quantiles(took_ns, n=100)[98] / 1e6


def neighbour_figure(found: Found) -> Figure:
    ours, theirs = p99_ms(found["drain"]), p99_ms(found["torch"])
    last = {way: median(max(one["seconds"]) for one in found[way]) for way in ("drain", "torch")}
    counts = [sum(len(one["reads_ns"]) for one in found[way]) for way in ("torch", "drain")]
    return Figure(
        "tier_neighbour_p99",
        theirs / ours,
        ">=",
        10,
        f"p99 of small reads beside torch.save {theirs:.0f} ms ({counts[0]} reads), beside drains "
        f"{ours:.1f} ms ({counts[1]}); all of them took {last['torch']:.1f} s and "
        f"{last['drain']:.1f} s",
    )


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    samples = near_samples(setting)
    outcome.samples["near"] = samples
    outcome.figures.append(near_figure(samples))
    setting.say("a node with a tier, and spinning disks")
    one = run_on_disks(setting, "one", ONE, setting.rounds)
    outcome.figures += one_node_figures(one)
    setting.settle()
    setting.say("32 nodes with tiers, and the same")
    many = run_on_disks(setting, "many", MANY, min(setting.rounds, ROUNDS_OF_MANY))
    outcome.figures.append(neighbour_figure(many))
    outcome.facts["tier"] = {"one": one, "many": many}
    for name, part in (("a tier", ONE), ("tiers of many", MANY)):
        outcome.ceilings.append(storm.sentence(name, part))
    return outcome
