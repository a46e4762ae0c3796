# SPDX-License-Identifier: Apache-2.0
"""Run the storm of examples/storm_demo.sh: eight ranks, once with torch.save and once with ioshape.

    python -m tests.bench.storm_demo storm.svg

draws the picture. The package must be importable, and stripefs must be built.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from striped import striped, unavailable

from .storm import (
    BLIND,
    HDD,
    LUSTRE,
    MIB,
    OURS,
    THEIRS,
    Found,
    Part,
    StormError,
    mounted,
    own_environment,
    reads_p99_ms,
    run_mounted,
    seconds,
)

RANKS, N_BYTES = 8, 48 * MIB

#: Two nodes on a simulated Lustre. Each has its own mount, which takes root.
NODES = Part(
    {**HDD, **LUSTRE, "stripe_count": -1}, (), ranks=RANKS, n_bytes=N_BYTES, nodes=2, rounds=1
)
#: One node on a filesystem that reveals nothing about its storage.
ALONE = Part(
    {**HDD, **BLIND, "stripe_count": -1, "clients": 1},
    (),
    ranks=RANKS,
    n_bytes=N_BYTES,
    nodes=1,
    rounds=1,
    blind=True,
)


def say(*lines: str) -> None:
    print("", *lines, sep="\n", flush=True)


@contextmanager
def watched(variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the screens of "ioshape top", one text each.

    The list is complete when the block ends.
    """
    looks: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-m", "ioshape", "top", "--interval", "0.3"],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as top:
        try:
            yield looks
        finally:
            top.terminate()
            text, _ = top.communicate()
    looks += text.split("\n\n")


def fullest(looks: list[str]) -> str:
    """Return the screen with the most waiting writers."""
    return max(looks, key=lambda look: look.count(" waits ") + look.count("\nwaits "), default="")


def ending(found: Found, picture: str) -> None:
    held = [seconds(found, way, "stall_s") for way in (THEIRS, OURS)]
    reads = [reads_p99_ms(found, way) for way in (THEIRS, OURS)]
    done = [seconds(found, way, "makespan_s") for way in (THEIRS, OURS)]
    say(
        f"training stands still for   {held[1]:.2f} s instead of {held[0]:.2f} s",
        f"a neighbour's read (p99)    {reads[1]:.0f} ms instead of {reads[0]:.0f} ms",
        f"(all ranks are done after {done[1]:.2f} s instead of {done[0]:.2f} s)",
        f"the picture: {os.path.abspath(picture)}",  # noqa: PTH100
    )


def main(picture: str) -> int:
    reason = unavailable()
    if reason:
        sys.exit(f"storm_demo: {reason}")
    part = NODES if os.geteuid() == 0 else ALONE
    say(
        f"== {RANKS} ranks, nodes: {part.nodes}, save {N_BYTES // MIB} MiB each at the same time,",
        "   to eight spinning disks that stripefs simulates; its time is 4 times slower.",
        "   First with torch.save and fsync, then with ioshape.save_async; each once to warm up.",
        "   Neighbours read and write small files beside them.",
    )
    with (
        striped(**mounted(part)) as mount,
        own_environment(part) as variables,
        watched(variables) as looks,
    ):
        found = run_mounted(mount, variables, part, picture)
    say('== What "ioshape top" showed while the ranks wrote in turn', fullest(looks))
    ending(found, picture)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except StormError as error:
        sys.exit(f"storm_demo: {error}")
