# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape bench": measures torch.save, ioshape and the ceiling of a filesystem.

It checks the arguments and prints results; bench_measure.py measures.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    SentenceError,
    Table,
    columns,
    human_size,
    json_option,
    plural,
    remark,
    say,
    say_json,
    size_option,
)
from ioshape._core.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._cli.bench_measure import Latency, Neighbours, Storm, Summary

WAYS = {
    "torch": "torch.save + fsync",
    "buffered": "torch.save",
    "save": "ioshape.save",
    "async": "ioshape.save_async",
    "open": "save_async, no slots",
    "node": "save_group, node",
    "rank0": "save_group, rank0",
    "ceiling": "ceiling",
}
_BY_GROUPS = ("node", "rank0")
#: default ways for one rank and for several
_OF_ONE_RANK = ("torch", "buffered", "save", "async", "ceiling")
_OF_MANY_RANKS = ("torch", "save", "async", *_BY_GROUPS)

_PREFIX = ".ioshape-bench-"
_SLACK_BYTES = 64 << 20
_LINGERS_S = 10.0
_LEAST_BYTES = 64 << 10
_USUAL_BYTES = 1 << 30
#: memory of a process that has imported torch, before it saves anything
_RANK_BYTES = 64 << 20
_MOST_RANKS = 512


def _measure(parent: Path, n_ranks: int, n_bytes: int, ways: tuple[str, ...], rounds: int) -> Storm:
    if n_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    try:
        from ioshape._cli import bench_measure as measure  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise SentenceError(
            f"the bench needs torch ({error}); install it: pip install torch"
        ) from None
    from ioshape._cli.bench_members import MemberError  # noqa: PLC0415

    total = n_ranks * n_bytes * (rounds + 1) * len(ways)
    with _scratch(parent) as folder:
        remark(
            f"ioshape: {who_saves(n_ranks, n_bytes)} to {folder}, about "
            f"{human_size(total)} in total; the folder is removed at the end"
        )
        try:
            plan = measure.Plan(n_ranks, n_bytes, ways, rounds)
            with measure.Storm(plan, folder) as storm, _status() as tell:
                storm.tell = tell
                storm.measure()
        except MemberError as error:
            raise SentenceError(f"the bench failed: {error}") from None
    return storm


def who_saves(n_ranks: int, n_bytes: int) -> str:
    """Return a phrase that names the ranks and the bytes that each saves."""
    each = " each" if n_ranks > 1 else ""
    return f"{plural(n_ranks, 'rank')} saving {human_size(n_bytes)}{each}"


def _ways(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> tuple[str, ...] | None:
    if text is None:
        return None
    ways = tuple(text.split(","))
    for way in ways:
        if way not in WAYS:
            raise click.BadParameter(f"{way!r} is not one of {', '.join(WAYS)}")
        if ways.count(way) > 1:
            raise click.BadParameter(f"{way} is named twice")
    return ways


# ---- Preparations: free space and memory, the scratch folder, the status line -------------------


def _check_space(folder: Path, n_bytes: int) -> None:
    """Raise SentenceError if the filesystem lacks space for the files of one way.

    The files of a way are removed before the next way begins.
    """
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    needed = n_bytes + n_bytes // 50 + _SLACK_BYTES
    # Some filesystems report a size of 0.
    if there.f_blocks and free < needed:
        raise SentenceError(
            f"{folder} has {human_size(free)} free, but the bench needs {human_size(needed)}; free "
            "space, or choose a smaller --size"
        )


def _check_memory(n_bytes: int) -> None:
    """Raise SentenceError if less than `n_bytes` of memory, and some slack, are available."""
    needed = n_bytes + _SLACK_BYTES * 4
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            if free < needed:
                raise SentenceError(
                    f"{human_size(free)} of memory is free, but the bench needs "
                    f"{human_size(needed)}; choose a smaller --size"
                )


def _check_folder(path: str) -> Path:
    folder = Path(path)
    if not folder.exists():
        raise SentenceError(f"there is no directory {path}; name one on the filesystem to measure")
    if not folder.is_dir():
        raise SentenceError(
            f"{path} is not a directory; name one on the filesystem to measure, such as "
            f"{folder.absolute().parent}"
        )
    return folder


def _terminated(number: int, _frame: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Make a scratch folder, and remove it at the end, also after Ctrl-C and kill."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise SentenceError(
            f"cannot create files in {parent}: {error.strerror}; name a directory that you can "
            "write to"
        ) from None
    try:
        yield folder
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # If a file was open when it was removed, an NFS client keeps it for a moment under another
        # name. So the removal is repeated.
        end = time.monotonic() + _LINGERS_S
        while folder.exists() and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.01)
        if folder.exists():
            remark(f"ioshape: cannot remove {folder}; remove it by hand")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current activity on a terminal until the block ends."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.text import Text  # noqa: PLC0415

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(one_line(text)))


# ---- Output of results --------------------------------------------------------------------------


def figures(storm: Storm, parent: Path) -> dict[str, Any]:
    """Return all results, for JSON."""
    import torch  # noqa: PLC0415

    import ioshape  # noqa: PLC0415
    from ioshape._cli.bench_measure import Neighbours, Ratios  # noqa: PLC0415

    plan = storm.plan
    first = plan.ways[0]
    return {
        "path": str(parent.absolute()),
        "filesystem": filesystem(storm),
        "ranks": plan.ranks,
        "bytes": plan.n_bytes,
        "ioshape": ioshape.__version__,
        "torch": str(torch.__version__),
        "alone": asdict(Neighbours.of(storm.alone)),
        "ways": {way: _way_json(storm, one) for way, one in storm.summaries.items()},
        "against": first,
        "ratios": {
            way: asdict(Ratios.of(storm.summaries[way], storm.summaries[first]))
            for way in plan.ways[1:]
        },
    }


def _way_json(storm: Storm, summary: Summary) -> dict[str, Any]:
    report = summary.typical.ranks[0].report
    gb = _gigabytes(storm)
    return {
        "makespan_s": summary.makespan_s,
        "mean_completion_s": summary.mean_completion_s,
        "stall_s": summary.stall_s,
        "most_stall_s": summary.most_stall_s,
        "gb_per_s": gb / summary.makespan_s,
        "cpu_seconds_per_gb": summary.cpu_s / gb,
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


def _gigabytes(storm: Storm) -> float:
    """Return the gigabytes that all ranks save together in a round."""
    return storm.plan.ranks * storm.plan.n_bytes / 1e9


def filesystem(storm: Storm) -> str:
    """Return the filesystem that a report names; "unknown" if only torch saved."""
    reports = [summary.typical.ranks[0].report for summary in storm.summaries.values()]
    return next((str(one["filesystem"]) for one in reports if one), "unknown")


def _ms(latency: Latency | None) -> tuple[str, str]:
    return ("-", "-") if latency is None else (f"{latency.p50_ms:.1f}", f"{latency.p99_ms:.1f}")


def _row(label: str, cells: list[str], beside: Neighbours) -> list[str]:
    return [label, *cells, *_ms(beside.reads), *_ms(beside.writes)]


def _show(storm: Storm, parent: Path) -> None:
    from ioshape._cli.bench_measure import Neighbours  # noqa: PLC0415

    plan, gb = storm.plan, _gigabytes(storm)
    say(
        f"{parent}: {filesystem(storm)}; {who_saves(plan.ranks, plan.n_bytes)}; "
        f"{plural(plan.rounds, 'round')}"
    )
    say()
    table = Table(
        *columns("<way", ">all done s", ">mean s", ">stall s", ">GB/s", ">CPU s/GB"),
        *columns(">reads p50 ms", ">p99 ms", ">writes p50 ms", ">p99 ms"),
    )
    table.add(*_row("no saves", ["-"] * 5, Neighbours.of(storm.alone)))
    for way, one in storm.summaries.items():
        seconds = (one.makespan_s, one.mean_completion_s, one.stall_s)
        cells = [f"{value:.3f}" for value in seconds]
        cells += [f"{value:.2f}" for value in (gb / one.makespan_s, one.cpu_s / gb)]
        table.add(*_row(WAYS[way], cells, one.neighbours))
    table.show()
    say()
    for sentence in _sentences(storm):
        say(sentence)


def _sentences(storm: Storm) -> list[str]:
    from ioshape._cli.bench_measure import Ratios  # noqa: PLC0415

    first = storm.plan.ways[0]
    sentences = []
    for way in storm.plan.ways[1:]:
        ratios = Ratios.of(storm.summaries[way], storm.summaries[first])
        parts = [f"all ranks saved {ratios.makespan:.2f} times as fast"]
        if storm.plan.ranks > 1:
            parts.append(f"the mean rank {ratios.mean_completion:.2f} times")
        if ratios.reads_p99:
            parts.append(f"99 % of a neighbour's reads {ratios.reads_p99:.2f} times")
        sentences.append(f"{WAYS[way]} compared with {WAYS[first]}: {', '.join(parts)}.")
    return sentences + _downgrades(storm)


def _downgrades(storm: Storm) -> list[str]:
    found = {
        f"Note, {WAYS[way]}: {fallback}."
        for way, summary in storm.summaries.items()
        for rank in summary.typical.ranks
        if rank.report
        for fallback in rank.report["downgrades"]
    }
    return sorted(found)


# ---- The command ---------------------------------------------------------------------------------


@click.command(short_help="Measure torch.save, ioshape and raw writes on a filesystem.")
@click.argument("path", default=".", type=click.Path(file_okay=False))
@click.option(
    "--ranks",
    "n_ranks",
    metavar="R",
    default=1,
    show_default=True,
    type=click.IntRange(1, _MOST_RANKS),
    help="Number of ranks, which save together.",
)
@click.option(
    "--size",
    metavar="BYTES",
    callback=lambda *given: given[2] and size_option(*given),
    help="Bytes that each rank saves, such as 4G or 512M.  [default: 1G divided by the number of "
    "ranks]",
)
@click.option(
    "--ways",
    metavar="WAY,...",
    callback=_ways,
    help="Ways to save; the others are compared with the first.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    metavar="N",
    type=click.IntRange(1, 1000),
    help="Number of rounds of each way.",
)
@json_option
def command(
    path: str,
    n_ranks: int,
    size: int | None,
    ways: tuple[str, ...] | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Save the tensors of a transformer to the directory PATH in several ways, and compare them.

    \b
    torch        - torch.save and fsync, one file per rank
    buffered     - torch.save without fsync: not durable
    save         - ioshape.save, one file per rank
    async        - ioshape.save_async, until the file is durable
    open         - ioshape.save_async without slots: all ranks write at once
    node, rank0  - ioshape.save_group in these modes
    ceiling      - only direct writes of large blocks, and an fsync

    Without --ways, one rank saves in all ways except open, node and rank0. Several ranks save in
    all ways except open, buffered and ceiling. The ways alternate, after a warm-up round that is
    not counted. "training held" is the time for which a rank's training waits.

    Meanwhile neighbour processes read small uncached files, or create and sync small files. The
    command measures their latency during saves and before the first save.

    All files go to a folder below PATH, which is removed at the end, also after Ctrl-C. The bench
    uses the settings that "ioshape settings" shows, except trace and full. Other load on the
    machine or the filesystem changes the results, and many ranks slow down other users.

    Examples:

    \b
    ioshape bench /scratch
    ioshape bench /scratch --size 8G --rounds 5 --json > bench.json
    ioshape bench /scratch --ranks 32 --size 256M
    ioshape bench /scratch --ranks 8 --ways open,async  - what slots change
    """
    parent = _check_folder(path)
    size = size if size is not None else _USUAL_BYTES // n_ranks
    if size < _LEAST_BYTES:
        raise click.BadParameter(f"at least {human_size(_LEAST_BYTES)}", param_hint="--size")
    ways = ways or (_OF_ONE_RANK if n_ranks == 1 else _OF_MANY_RANKS)
    _check_space(parent, n_ranks * size)
    # One for the tensors, one for their copies, and one for the writers of groups or for saves
    # without slots.
    copies = 3 if any(way in (*_BY_GROUPS, "open") for way in ways) else 2
    _check_memory(n_ranks * (copies * size + _RANK_BYTES))
    storm = _measure(parent, n_ranks, size, ways, rounds)
    if as_json:
        say_json(figures(storm, parent))
    else:
        _show(storm, parent)
