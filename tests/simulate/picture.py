# SPDX-License-Identifier: Apache-2.0
"""Draw the saves of the largest jobs as a timeline, as in docs/scale.svg."""

from pathlib import Path

import timeline_plot
from ioshape._cli.trace import Span
from timeline_plot import Panel, Row, Save, Timeline

from .cluster import Cluster
from .order import ORDERS
from .report import AT_ONCE, queue_of
from .storage import Storage
from .workload import jobs

ROWS = 20
FROM_S, TO_S = 1800.0, 2700.0


def panel(cluster: Cluster, title: str) -> Panel:
    largest = sorted(cluster.states, key=lambda state: -state.job.nodes)[:ROWS]
    rows = {
        state.job.number: Row(f"{state.job.nodes:,} nodes", [], -state.job.nodes)
        for state in largest
    }
    for save, end_s in cluster.saves:
        row = rows.get(save.job.number)
        if row is None or end_s < FROM_S or save.asked_s > TO_S:
            continue
        begin, first, end = (
            min(max(at, FROM_S), TO_S) - FROM_S for at in (save.asked_s, save.first_s, end_s)
        )
        spans = [Span("wait", begin, first), Span("write", first, end)]
        row.saves.append(Save(begin, end, [one for one in spans if one.end_s > one.begin_s]))
    return Panel(title, [row for row in rows.values() if row.saves])


def draw(storage: Storage, path: Path, *, count: int, nodes: int, seed: int) -> None:
    work = jobs(count, nodes, storage.bandwidth, seed)
    panels = []
    for name in (AT_ONCE, "fair", "ours"):
        queue = queue_of(name, storage)
        cluster = Cluster(work, storage, queue, background=True, seed=seed)
        cluster.start()
        cluster.run(TO_S + 600)
        panels.append(panel(cluster, name if name == AT_ONCE else ORDERS[name].name))
    timeline = Timeline(
        f"Saves of the {ROWS} largest of {count} jobs on {nodes:,} nodes",
        panels,
        f"simulated; {TO_S - FROM_S:.0f} s, half an hour after the start",
    )
    timeline_plot.draw(timeline, str(path))
