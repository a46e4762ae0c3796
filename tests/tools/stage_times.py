# SPDX-License-Identifier: Apache-2.0
"""Checks that no stage of tests/run.sh computes much longer than planned.

The argument is build/results/seconds.tsv of a complete run: stage, seconds and CPU seconds in each
line. CPU seconds hardly depend on what else the machine does. They do depend on the processor, so
the stages are compared with each other: the median of measured ÷ planned is the machine's slowness.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

#: CPU seconds of each stage on a machine with two cores. Style takes fewer where mypy has looked at
#: the files before; fault depends on the acts of the campaign that the commit chooses.
PLANNED = {
    "style": 45,
    "gcc": 70,
    "house": 30,
    "fault": 30,
    "asan": 170,
    "tsan": 115,
    "python": 570,
}
MOST_GROWTH = 1.5


def read(path: Path) -> dict[str, float]:
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return {stage: float(cpu_s) for stage, _, cpu_s in lines}


def grown(measured: Mapping[str, float], planned: Mapping[str, float]) -> list[str]:
    """Return a sentence for each stage that grew by more than MOST_GROWTH."""
    slowness = median(measured[stage] / planned[stage] for stage in planned)
    if not slowness:
        return [f"the CPU seconds of most stages were not counted: {measured}"]
    return [
        f"{stage} computes for {measured[stage]:.0f} s; planned are {planned[stage]} s, which are"
        f" {planned[stage] * slowness:.0f} s on this machine"
        for stage in planned
        if measured[stage] > planned[stage] * slowness * MOST_GROWTH
    ]


def main(path: Path) -> int:
    found = grown(read(path), PLANNED)
    for sentence in found:
        print(f"{sentence}: make its tests cheaper, or raise PLANNED in tests/tools/stage_times.py")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
