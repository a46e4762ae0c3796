# SPDX-License-Identifier: Apache-2.0
"""Measure the preload library: what neighbours of unchanged programs gain, and what it costs.

The storm is the one of storm.py with ranks that run `cp` or save numpy arrays: without the
library, with it, and with ioshape's own background saves. Its files, and the growth after which a
file takes slots, are a sixteenth of a usual checkpoint's.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import sizes
from preloaded import LIBRARY, differences, make_inputs, missing, preload, run
from preloaded_table import TABLE
from tree import ROOT, build_folder

from . import storm
from .preload_ways import PLAIN, PRELOADED, SCALE
from .rounds import Sample, interleave, time_ratio
from .setting import Figure, Outcome, Setting

ROUNDS = 3
WAYS = (PLAIN, PRELOADED, storm.OURS)
N_BYTES = (1 << 30) // SCALE
PART = storm.Part(
    {**storm.HDD, **storm.LUSTRE, "stripe_count": -1},
    (),
    ways=WAYS,
    ranks=16,
    n_bytes=N_BYTES,
)
#: Two cores keep up with eight writers and their servers.
CLUSTER = storm.Part(
    storm.CLUSTER.parameters, (), ways=WAYS, ranks=8, n_bytes=N_BYTES, nodes=2, blind=True
)
PREPARE_S = 300


# ---- The storm -----------------------------------------------------------------------------------


def neighbour_p99(found: storm.Found) -> Figure:
    """Return the ratio of a neighbour's latencies, beside preloaded programs to beside ioshape."""
    plain, preloaded, ours = (storm.reads_p99_ms(found, way) for way in WAYS)
    return Figure(
        "preload_neighbour_p99",
        preloaded / ours,
        "<=",
        1.5,
        f"p99 of small reads beside preloaded programs {preloaded:.1f} ms, beside save_async "
        f"{ours:.1f} ms, beside programs without the library {plain:.1f} ms",
    )


def makespan(found: storm.Found) -> Figure:
    plain, preloaded = (storm.seconds(found, way, "makespan_s") for way in (PLAIN, PRELOADED))
    remark = f"with the library {preloaded:.2f} s, without {plain:.2f} s"
    return Figure("preload_makespan", preloaded / plain, "<=", 1.05, remark)


def measure_storm(setting: Setting, outcome: Outcome) -> None:
    part = replace(CLUSTER if setting.on else PART, rounds=min(ROUNDS, setting.rounds))
    name = setting.on or "stripefs"
    setting.say(f"{name}: {part.ranks} programs on {part.nodes} nodes")
    found = storm.run_on_cluster(setting.on, part) if setting.on else storm.run(part)
    outcome.figures += [neighbour_p99(found), makespan(found)]
    outcome.facts[name] = found
    outcome.ceilings.append(storm.sentence(name, part))


# ---- Programs that take no slots -----------------------------------------------------------------


def compared(
    setting: Setting, rounds: int, sample: Callable[[dict[str, str]], Sample]
) -> dict[str, list[Sample]]:
    """Take samples without the library and with it, in turns."""
    library = {"LD_PRELOAD": str(build_folder() / LIBRARY)}
    contestants = {"without": partial(sample, {}), "with": partial(sample, library)}
    return interleave(contestants, rounds, setting.settle)


def call_ns(setting: Setting) -> Figure:
    """Return the nanoseconds of processor time that the library adds to a small write."""
    program = build_folder() / "tests" / "bench" / "bench-strange"

    def sample(variables: dict[str, str]) -> Sample:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            done = subprocess.run(
                [str(program), file.name],
                env={**os.environ, **variables},
                capture_output=True,
                check=True,
            )
        return Sample(float(done.stdout), 4096)

    found = compared(setting, setting.rounds * 3, sample)
    took = {name: median(one.seconds for one in samples) for name, samples in found.items()}
    remark = f"a write of 4 KiB to memory takes {took['without']:.0f} ns, with the library "
    return Figure(
        "preload_call_ns",
        took["with"] - took["without"],
        "<=",
        150,
        f"{remark}{took['with']:.0f} ns",
    )


def build_ratio(setting: Setting) -> Figure:
    """Return the ratio of times of a build of this project with two processes."""
    folder = setting.folder / "build"

    def sample(variables: dict[str, str]) -> Sample:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(
            ["meson", "setup", folder, ROOT],
            env={**os.environ, "CCACHE_DISABLE": "1"},
            check=True,
            capture_output=True,
            timeout=PREPARE_S,
        )
        begin = time.monotonic()
        subprocess.run(
            ["ninja", "-C", folder, "-j2"],
            env={**os.environ, "CCACHE_DISABLE": "1", **variables},
            check=True,
            capture_output=True,
        )
        return Sample(time.monotonic() - begin, 1)

    found = compared(setting, min(ROUNDS, setting.rounds), sample)
    with_it, without = (median(one.seconds for one in found[name]) for name in ("with", "without"))
    return Figure(
        "preload_build_ratio",
        time_ratio(found["with"], found["without"]),
        "<=",
        1.01,
        f"ninja -j2 of this project, with the library {with_it:.1f} s, without {without:.1f} s",
    )


def programs_broken(setting: Setting) -> Figure:
    """Run the table of programs that must not notice the library."""
    broken, tried = [], 0
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        inputs = Path(folder) / "inputs"
        make_inputs(inputs)
        for case in TABLE:
            if missing(case):
                continue
            tried += 1
            plain = run(case, inputs, Path(folder) / "work", {})
            variables = preload(Path(folder), IOSHAPE_PRELOAD_WAIT_S=str(case.wait_s))
            if differences(plain, run(case, inputs, Path(folder) / "work", variables)):
                broken.append(case.name)
    remark = f"{', '.join(broken) or 'none'} of {tried} that are installed here"
    return Figure("programs_broken", len(broken), "<=", 0, remark)


def code() -> Figure:
    lines = sizes.lines_in("libioshape/preload")
    return Figure("preload_code", lines, "<=", 1200, "lines of C of the library and its helper")


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "programs without ioshape in the storm of ioshape bench, with the preload library, without "
        "it, and ioshape's own saves, in turns; medians of rounds, latencies of all rounds together"
    )
    measure_storm(setting, outcome)
    for step in (call_ns, build_ratio, programs_broken):
        setting.say(step.__name__)
        outcome.figures.append(step(setting))
    outcome.figures.append(code())
    return outcome
