# SPDX-License-Identifier: Apache-2.0
"""One part of the storm: the engine of "ioshape bench", on nodes that it plays, and counted.

    python -m tests.bench.storm_process MOUNT BACKING PLAN [PICTURE]

The plan is that of the engine, as JSON. Prints what was found, as JSON. It is a process of its own
because ranks are forked from it: it must not have started a thread.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from ioshape.cli.bench.command import figures
from ioshape.cli.bench.measure import Plan, Storm
from striped import ask


def counts(backing: Path) -> dict[str, int]:
    """Operations that the metadata server was asked for, by kind."""
    counted: dict[str, int] = json.loads(ask(backing, "statistics"))["metadata"]
    return {name: count for name, count in counted.items() if name != "total"}


def count_metadata(storm: Storm, backing: Path) -> dict[str, dict[str, int]]:
    """Of one save of all ranks in each way. Neighbours rest."""
    found = {}
    for way in storm.plan.ways:
        before = counts(backing)
        storm.save_once(way)
        after = counts(backing)
        storm.remove(way)
        found[way] = {
            name: count - before.get(name, 0)
            for name, count in after.items()
            if count > before.get(name, 0)
        }
    return found


def main(mount: str, backing: str, plan: str, picture: str = "") -> None:
    parameters: dict[str, Any] = json.loads(plan)
    parameters["ways"] = tuple(parameters["ways"])
    with (
        tempfile.TemporaryDirectory(prefix="storm-", dir=mount) as folder,
        Storm(Plan(**parameters), Path(folder)) as storm,
    ):
        storm.measure()
        metadata = count_metadata(storm, Path(backing))
    found = figures(storm, Path(mount))
    for way, counted in metadata.items():
        found["ways"][way]["metadata"] = counted
    print(json.dumps(found))
    if picture:
        from ioshape.cli.bench.picture import timeline_of  # noqa: PLC0415
        from ioshape.cli.trace import plot  # noqa: PLC0415

        plot.draw(timeline_of(storm), picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
