# SPDX-License-Identifier: Apache-2.0
"""Print the results of the benchmarks as text and as JSON."""

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from .rounds import Sample, Samples, disturbed, median_gb_per_s, median_seconds
from .setting import Outcome


def first_line_of(path: str, start: str = "") -> str:
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(start):
                return line.removeprefix(start).strip(" \t:")
    except OSError:
        pass
    return "unknown"


def mount_of(folder: Path) -> dict[str, str]:
    """Return filesystem, device and options of the mount that has the folder."""
    done = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE,OPTIONS", "--target", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    words = done.stdout.split(maxsplit=2)
    return dict(
        zip(("filesystem", "device", "mount_options"), (w.strip() for w in words), strict=False)
    )


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], check=False, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def machine(folder: Path) -> dict[str, object]:
    return {
        "machine": platform.machine(),
        "processor": first_line_of("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": first_line_of("/proc/meminfo", "MemTotal"),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": first_line_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "commit": commit(),
        "settings": {k: v for k, v in os.environ.items() if k.startswith("IOSHAPE_")},
        **mount_of(folder),
    }


# ---- JSON ---------------------------------------------------------------------------------------


def describe_samples(samples: Samples) -> dict[str, object]:
    return {
        name: {
            "median_seconds": median_seconds(ones),
            "median_gb_per_s": median_gb_per_s(ones),
            "seconds": [one.seconds for one in ones],
            "foreign_bytes": [one.foreign_bytes for one in ones],
            "cpu_seconds": [
                one.details["cpu_seconds"] for one in ones if "cpu_seconds" in one.details
            ],
        }
        for name, ones in samples.items()
    }


def as_json(outcomes: Mapping[str, Outcome], context: Mapping[str, object]) -> dict[str, object]:
    figures = [figure for outcome in outcomes.values() for figure in outcome.figures]
    return {
        "figures": {figure.name: figure.value for figure in figures},
        "context": {
            **context,
            "method": "contestants take turns; each round gives a ratio, a figure is their median",
            "targets": {
                figure.name: {
                    "target": f"{figure.relation} {figure.target:g}",
                    "met": figure.met,
                    "remark": figure.remark,
                }
                for figure in figures
            },
            "ceilings": [text for outcome in outcomes.values() for text in outcome.ceilings],
            "benchmarks": {
                name: {
                    **outcome.facts,
                    "samples": {k: describe_samples(v) for k, v in outcome.samples.items()},
                }
                for name, outcome in outcomes.items()
            },
        },
    }


# ---- Text ---------------------------------------------------------------------------------------


def figure_lines(outcome: Outcome) -> list[str]:
    lines = [f"{'figure':<27}{'value':>9}  {'target':<9}{'met':<5}"]
    lines += [
        f"{one.name:<27}{one.value:>9.3f}  {f'{one.relation} {one.target:g}':<9}"
        f"{'yes' if one.met else 'NO':<5}{one.remark}"
        for one in outcome.figures
    ]
    return lines


def sample_line(name: str, ones: list[Sample]) -> str:
    seconds = sorted(one.seconds for one in ones)
    cpu = [float(one.details["cpu_seconds"]) for one in ones if "cpu_seconds" in one.details]
    # The speed of a tiny file has no meaning, because its time is all latency.
    speed = f"{median_gb_per_s(ones):>8.3f} GB/s" if ones[0].bytes >= 1 << 20 else " " * 13
    line = f"  {name:<36}{speed}{median(seconds):>10.4f} s ({seconds[0]:.4f} to {seconds[-1]:.4f})"
    line += f"  cpu {median(cpu):.4f} s" if cpu else ""
    shared = disturbed(ones)
    return line + (f"  {shared} of {len(ones)} beside other I/O: measure again" if shared else "")


def as_text(outcomes: Mapping[str, Outcome], context: Mapping[str, object]) -> str:
    lines = []
    for name, outcome in outcomes.items():
        lines += ["", f"== {name}", *figure_lines(outcome)]
        lines += ["", "medians, fastest and slowest:"] if outcome.samples else []
        for part, samples in outcome.samples.items():
            lines += [f" {part}", *(sample_line(who, ones) for who, ones in samples.items())]
        lines += ["", "the machine's ceiling in this run:", *(f"  {c}" for c in outcome.ceilings)]
    lines += ["", ", ".join(f"{key}: {value}" for key, value in context.items() if value)]
    return "\n".join(lines)
