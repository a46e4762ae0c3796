# SPDX-License-Identifier: Apache-2.0
"""ioshape bench storm."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ioshape.cli.bench.scratch import check_folder, check_memory, check_space, scratch, status
from ioshape.cli.output import (
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
from ioshape.cli.paths import check_file_to_write, json_option, plot_option, write_file

if TYPE_CHECKING:
    from pathlib import Path

    from ioshape.cli.bench.measure import Latency, Neighbours, Storm, Summary

WAYS = {
    "torch": "torch.save + fsync",
    "save": "ioshape.save",
    "async": "ioshape.save_async",
    "node": "save_group, node",
    "rank0": "save_group, rank0",
}

_LEAST_BYTES = 64 << 10
#: what a process with torch takes before it saves anything
_RANK_BYTES = 32 << 20
_MOST_RANKS = 512
_USUAL_RANKS = 16


def _measure(parent: Path, n_ranks: int, n_bytes: int, ways: tuple[str, ...], rounds: int) -> Storm:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    try:
        from ioshape.cli.bench import measure  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise SentenceError(f"the storm needs torch ({error}); pip install torch") from None
    from ioshape.cli.bench.crowd import MemberError  # noqa: PLC0415

    total = n_ranks * n_bytes * (rounds + 1) * len(ways)
    with scratch(parent) as folder:
        note(
            f"ioshape: {plural(n_ranks, 'rank')} save {human_size(n_bytes)} each to {folder}, "
            f"about {human_size(total)} in all; the folder is removed at the end"
        )
        try:
            plan = measure.Plan(n_ranks, n_bytes, ways, rounds)
            with measure.Storm(plan, folder) as storm, status() as tell:
                storm.tell = tell
                storm.measure()
        except MemberError as error:
            raise SentenceError(f"the storm failed: {error}") from None
    return storm


def _ways(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    ways = tuple(text.split(","))
    for way in ways:
        if way not in WAYS:
            raise click.BadParameter(f"{way!r} is not one of {', '.join(WAYS)}")
        if ways.count(way) > 1:
            raise click.BadParameter(f"{way} is named twice")
    return ways


# ---- Telling ------------------------------------------------------------------------------------


def as_json(storm: Storm, parent: Path) -> dict[str, Any]:
    """All figures."""
    import torch  # noqa: PLC0415

    import ioshape  # noqa: PLC0415
    from ioshape.cli.bench.measure import Neighbours, Ratios  # noqa: PLC0415

    plan = storm.plan
    first = plan.ways[0]
    return {
        "path": str(parent.absolute()),
        "filesystem": filesystem(storm),
        "ranks": plan.ranks,
        "nodes": plan.nodes,
        "bytes": plan.n_bytes,
        "ioshape": ioshape.__version__,
        "torch": str(torch.__version__),
        "alone": asdict(Neighbours.of(storm.alone)),
        "ways": {way: _way_json(one) for way, one in storm.summaries.items()},
        "against": first,
        "ratios": {
            way: asdict(Ratios.of(storm.summaries[way], storm.summaries[first]))
            for way in plan.ways[1:]
        },
    }


def _way_json(summary: Summary) -> dict[str, Any]:
    report = summary.typical.ranks[0].report
    return {
        "makespan_s": summary.makespan_s,
        "mean_completion_s": summary.mean_completion_s,
        "stall_s": summary.stall_s,
        "most_stall_s": summary.most_stall_s,
        "neighbours": asdict(summary.neighbours),
        "rounds": [
            {
                "makespan_s": one.makespan_s,
                "completions_s": one.completions_s,
                "stalls_s": one.stalls_s,
            }
            for one in summary.rounds
        ],
        "report": {**report, "path": None} if report else None,
    }


def filesystem(storm: Storm) -> str:
    """As a report names it; "unknown" if only torch saved."""
    reports = [summary.typical.ranks[0].report for summary in storm.summaries.values()]
    return next((str(one["filesystem"]) for one in reports if one), "unknown")


def _ms(latency: Latency | None) -> tuple[str, str]:
    return ("-", "-") if latency is None else (f"{latency.p50_ms:.1f}", f"{latency.p99_ms:.1f}")


def _row(label: str, cells: list[str], beside: Neighbours) -> list[str]:
    return [label, *cells, *_ms(beside.reads), *_ms(beside.writes)]


def _show(storm: Storm, parent: Path) -> None:
    from ioshape.cli.bench.measure import Neighbours  # noqa: PLC0415

    plan = storm.plan
    say(
        f"{parent}: {filesystem(storm)}; {plural(plan.ranks, 'rank')} save "
        f"{human_size(plan.n_bytes)} each; {plural(plan.rounds, 'round')}"
    )
    say()
    table = Table(
        *columns("<way", ">all done s", ">mean s", ">training held s"),
        *columns(">reads p50 ms", ">p99 ms", ">writes p50 ms", ">p99 ms"),
    )
    table.add(*_row("nobody", ["-"] * 3, Neighbours.of(storm.alone)))
    for way, one in storm.summaries.items():
        figures = (one.makespan_s, one.mean_completion_s, one.stall_s)
        table.add(*_row(WAYS[way], [f"{value:.3f}" for value in figures], one.neighbours))
    table.show()
    say()
    for sentence in _sentences(storm):
        say(sentence)


def _sentences(storm: Storm) -> list[str]:
    from ioshape.cli.bench.measure import Ratios  # noqa: PLC0415

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
    "n_ranks",
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
    default=",".join(WAYS),
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
@json_option
@plot_option
def command(
    path: str,
    n_ranks: int,
    size: int,
    ways: tuple[str, ...],
    rounds: int,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Has many processes save together to the directory PATH, in several ways, and compares.

    Meanwhile neighbours read small files that lie in no cache, and others write and sync some. What
    they notice is measured, too, and before that what they have when nobody saves.

    \b
    torch          torch.save and an fsync, a file of each rank
    save           ioshape.save, a file of each rank
    async          ioshape.save_async, until the file is durable
    node, rank0    ioshape.save_group in these modes

    They run in turns, after a round that does not count. "training held" is how long a rank's
    training has to wait.

    Everything is written to a folder below PATH, which is removed at the end, also after Ctrl-C.
    The settings are those that "ioshape settings" shows, but for node, trace and full. Other users
    of the filesystem notice a storm.

    \b
    ioshape bench storm /scratch
    ioshape bench storm /scratch --ranks 32 --size 256M --plot storm.svg
    """
    parent = check_folder(path)
    if size < _LEAST_BYTES:
        raise click.BadParameter(f"at least {human_size(_LEAST_BYTES)}", param_hint="--size")
    check_file_to_write(json_path)
    check_space(parent, n_ranks * size)
    # Tensors, their copies, and those of a group's writers.
    check_memory(n_ranks * (size + size // 2 + _RANK_BYTES))
    storm = _measure(parent, n_ranks, size, ways, rounds)
    found = as_json(storm, parent)
    # What was measured is told first: a file that cannot be written does not lose it.
    if json_path == "-":
        say_json(found)
    else:
        _show(storm, parent)
        write_file(json_path, json.dumps(found, indent=2) + "\n")
    if plot_path is not None:
        from ioshape.cli.bench.picture import timeline_of  # noqa: PLC0415
        from ioshape.cli.trace import plot  # noqa: PLC0415

        plot.draw(timeline_of(storm), plot_path)
