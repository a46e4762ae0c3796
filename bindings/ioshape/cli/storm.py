# SPDX-License-Identifier: Apache-2.0
"""ioshape bench storm."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape.cli._output import (
    SentenceError,
    Table,
    columns,
    human_size,
    note,
    plural,
    say,
    say_json,
    size_option,
)
from ioshape.cli._scratch import (
    check_file_to_write,
    check_folder,
    check_memory,
    check_space,
    scratch,
    status,
    write_file,
)
from ioshape.cli._ways import USUAL, WAYS

if TYPE_CHECKING:
    from ioshape.cli._storm import Storm
    from ioshape.cli._storm_figures import Latency, Neighbours, Summary

_LEAST_BYTES = 64 << 10
#: what a process takes that has torch, and nothing to save
_RANK_BYTES = 32 << 20
_MOST_RANKS = 512
_USUAL_RANKS = 16


def _measure(parent: Path, **plan: Any) -> Storm:
    # Of the libraries that torch brings. Ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from ioshape.cli import _storm  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise SentenceError(f"the storm needs torch ({error}); pip install torch") from None
    from ioshape.cli._children import ChildError  # noqa: PLC0415

    wanted = _storm.Plan(**plan)
    total = wanted.ranks * wanted.n_bytes
    rounds = wanted.rounds + 1
    with scratch(parent) as folder:
        note(
            f"ioshape: {plural(wanted.ranks, 'rank')} save {human_size(wanted.n_bytes)} each to "
            f"{folder}, about {human_size(total * rounds * len(wanted.ways))} in all; the folder "
            "is removed at the end"
        )
        try:
            with _storm.Measurement(wanted, folder) as measurement, status() as tell:
                measurement.tell = tell
                measurement.all()
        except ChildError as error:
            raise SentenceError(f"the storm has failed: {error}") from None
    return measurement.storm


def _ways(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    for way in ways:
        if way not in WAYS:
            raise click.BadParameter(f"{way!r} is not one of {', '.join(WAYS)}")
        if ways.count(way) > 1:
            raise click.BadParameter(f"{way} is named twice")
    return ways


# ---- Telling -----------------------------------------------------------------------------------


def _as_json(storm: Storm, parent: Path) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    import ioshape  # noqa: PLC0415
    from ioshape.cli._storm_figures import Neighbours, Ratios  # noqa: PLC0415

    plan = storm.plan
    first = plan.ways[0]
    return {
        "path": str(parent.absolute()),
        "filesystem": _filesystem(storm),
        "ranks": plan.ranks,
        "nodes": plan.nodes,
        "bytes": plan.n_bytes,
        "rounds": plan.rounds,
        "neighbours": asdict(plan.habits),
        "ioshape": ioshape.__version__,
        "torch": str(torch.__version__),
        "alone": _neighbours_json(Neighbours.of(storm.alone)),
        "ways": {way: _way_json(summary) for way, summary in storm.summaries.items()},
        "against": first,
        "ratios": {
            way: asdict(Ratios.of(summary, storm.summaries[first]))
            for way, summary in storm.summaries.items()
            if way != first
        },
    }


def _neighbours_json(neighbours: Neighbours) -> dict[str, Any]:
    return {
        "reads": asdict(neighbours.reads) if neighbours.reads else None,
        "writes": asdict(neighbours.writes) if neighbours.writes else None,
    }


def _way_json(summary: Summary) -> dict[str, Any]:
    report = summary.typical.ranks[0].report
    return {
        "makespan_s": summary.makespan_s,
        "mean_completion_s": summary.mean_completion_s,
        "p99_completion_s": summary.p99_completion_s,
        "stall_s": summary.stall_s,
        "most_stall_s": summary.most_stall_s,
        "neighbours": _neighbours_json(summary.neighbours),
        "metadata_operations": summary.metadata_operations,
        "metadata": summary.metadata,
        "checked_bytes": summary.checked_bytes,
        "rounds": [
            {
                "makespan_s": one.makespan_s,
                "completions_s": [rank.end_s for rank in one.ranks],
                "stalls_s": [rank.stall_s for rank in one.ranks],
            }
            for one in summary.rounds
        ],
        "report": {**report, "path": None} if report else None,
    }


def _filesystem(storm: Storm) -> str:
    for summary in storm.summaries.values():
        report = summary.typical.ranks[0].report
        if report and report["filesystem"]:
            return str(report["filesystem"])
    return "unknown"


def _ms(latency: Latency | None) -> tuple[str, str]:
    return ("-", "-") if latency is None else (f"{latency.p50_ms:.1f}", f"{latency.p99_ms:.1f}")


def _show(storm: Storm, parent: Path) -> None:
    from ioshape.cli._storm_figures import Neighbours  # noqa: PLC0415

    plan = storm.plan
    nodes = f" of {plural(plan.nodes, 'node')}" if plan.nodes > 1 else ""
    say(
        f"{parent}: {_filesystem(storm)}; {plural(plan.ranks, 'rank')}{nodes} save "
        f"{human_size(plan.n_bytes)} each; {plural(plan.rounds, 'round')}"
    )
    say()
    table = Table(
        *columns(
            "<way",
            ">all done s",
            ">mean s",
            ">p99 s",
            ">training held s",
            ">reads p50 ms",
            ">p99 ms",
            ">writes p50 ms",
            ">p99 ms",
            ">metadata",
        )
    )
    alone = Neighbours.of(storm.alone)
    table.add("nobody", "-", "-", "-", "-", *_ms(alone.reads), *_ms(alone.writes), "-")
    for way, one in storm.summaries.items():
        count = one.metadata_operations
        table.add(
            WAYS[way],
            f"{one.makespan_s:.3f}",
            f"{one.mean_completion_s:.3f}",
            f"{one.p99_completion_s:.3f}",
            f"{one.stall_s:.3f}",
            *_ms(one.neighbours.reads),
            *_ms(one.neighbours.writes),
            "-" if count is None else f"{count:,}",
        )
    table.show()
    say()
    for sentence in _sentences(storm):
        say(sentence)


def _sentences(storm: Storm) -> list[str]:
    from ioshape.cli._storm_figures import Ratios  # noqa: PLC0415

    first = storm.plan.ways[0]
    sentences = []
    for way in storm.plan.ways[1:]:
        ratios = Ratios.of(storm.summaries[way], storm.summaries[first])
        reads = f", a neighbour's p99 of reads {ratios.reads_p99:.2f}" if ratios.reads_p99 else ""
        sentences.append(
            f"{WAYS[first]} takes {ratios.makespan:.2f} times as long as {WAYS[way]}, the mean of "
            f"its ranks {ratios.mean_completion:.2f}{reads}."
        )
    notes = {
        f"Note, {WAYS[way]}: {fallback}."
        for way, summary in storm.summaries.items()
        for rank in summary.typical.ranks
        if rank.report
        for fallback in rank.report["fallbacks"]
    }
    return sentences + sorted(notes)


@click.command(short_help="Measure what many ranks that save together do to a filesystem.")
@click.argument("path", default=".", type=click.Path(file_okay=False))
@click.option(
    "--ranks",
    default=_USUAL_RANKS,
    show_default=True,
    metavar="R",
    type=click.IntRange(1, _MOST_RANKS),
    help="Processes that save together.",
)
@click.option(
    "--size",
    default="32M",
    show_default=True,
    metavar="BYTES",
    callback=size_option,
    help="What each of them saves.",
)
@click.option(
    "--ways",
    default=",".join(USUAL),
    show_default=True,
    metavar="WAY,...",
    callback=_ways,
    help="Which ways are compared, with the first one.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    metavar="N",
    type=click.IntRange(1, 1000),
    help="How often each is measured.",
)
@click.option(
    "--nodes",
    default=1,
    show_default=True,
    metavar="N",
    type=click.IntRange(1, _MOST_RANKS),
    help="The ranks of a group act as if they were on so many nodes.",
)
@click.option(
    "--readers",
    default=8,
    show_default=True,
    metavar="N",
    type=click.IntRange(0, 64),
    help="Neighbours that read small files.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Leave out what measures no time: metadata operations are not counted, and nobody looks "
    "at the files.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write all numbers to a file as JSON; - for stdout, instead of the table.",
)
@click.option(
    "--svg",
    "svg_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Draw who did what when.",
)
@click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write that as a trace for Perfetto.",
)
def command(
    path: str,
    ranks: int,
    size: int,
    ways: tuple[str, ...],
    rounds: int,
    nodes: int,
    readers: int,
    quick: bool,
    json_path: str | None,
    svg_path: str | None,
    trace_path: str | None,
) -> None:
    """Has many processes save together to the directory PATH, in several ways, and compares.

    Meanwhile neighbours read small files that lie in no cache, and others write and sync some: what
    they notice is measured, too, and before that what they have when nobody saves.

    \b
    torch          torch.save and an fsync, a file of each rank
    save           ioshape.save, a file of each rank
    async          ioshape.save_async, until the file is durable
    node, rank0    ioshape.save_group in these modes
    node-async, rank0-async
                   ioshape.save_group_async

    They run in turns, after a round that does not count, and stock torch must find in the files
    what was saved. "training held" is how long a rank's training has to wait.

    Everything is written to a folder below PATH, which is removed at the end, also after Ctrl-C.
    The settings are those that "ioshape settings" shows, but for node, trace and full. Other users
    of the filesystem notice a storm.

    \b
    ioshape bench storm /scratch
    ioshape bench storm /scratch --ranks 32 --size 256M --svg storm.svg
    ioshape bench storm . --ways torch,async --trace storm.json
    """
    from ioshape.cli._neighbours import Habits  # noqa: PLC0415

    parent = check_folder(path)
    if size < _LEAST_BYTES:
        raise click.BadParameter(f"at least {human_size(_LEAST_BYTES)}", param_hint="--size")
    if ranks % nodes:
        raise click.BadParameter(
            f"{ranks} ranks cannot be spread evenly over {nodes} nodes", param_hint="--nodes"
        )
    for file in (json_path if json_path != "-" else None, svg_path, trace_path):
        check_file_to_write(file)
    check_space(parent, ranks * size)
    # Tensors, their copies, and those of a group's writers.
    check_memory(ranks * (size + size // 2 + _RANK_BYTES))
    storm = _measure(
        parent,
        ranks=ranks,
        n_bytes=size,
        ways=ways,
        rounds=rounds,
        nodes=nodes,
        count_metadata=not quick,
        check=not quick,
        habits=Habits(readers=readers),
    )
    found = _as_json(storm, parent)
    # What was measured is told first: nothing that becomes of a file can lose it.
    if json_path == "-":
        say_json(found)
    else:
        _show(storm, parent)
        write_file(json_path, json.dumps(found, indent=2) + "\n")
    _draw(storm, svg_path, trace_path)


def _draw(storm: Storm, svg_path: str | None, trace_path: str | None) -> None:
    from ioshape.cli import _chrome, _storm_timeline, _svg  # noqa: PLC0415

    if svg_path is not None:
        timeline = _storm_timeline.of_typical_rounds(storm, _filesystem(storm))
        write_file(svg_path, _svg.draw(timeline))
    if trace_path is not None:
        write_file(trace_path, _chrome.write(_storm_timeline.of_all_rounds(storm)))
