# SPDX-License-Identifier: Apache-2.0
"""ioshape trace."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    SentenceError,
    Table,
    columns,
    human_seconds,
    human_size,
    note,
    plural,
    say,
    say_json,
)
from ioshape._cli.paths import exit_for, json_option, plot_option

if TYPE_CHECKING:
    from ioshape._cli.trace.reports import Gust, Run

_MOST_PROBLEMS = 20
_MOST_ROWS = 50


def read_run(folder: str) -> Run:
    """The reports in a folder, with what is wrong with them on stderr."""
    from ioshape._cli.trace import reports  # noqa: PLC0415

    try:
        run = reports.read(Path(folder))
    except OSError as error:
        raise SentenceError(
            f"cannot read the reports in {folder}: {error.strerror}; name the folder that "
            "IOSHAPE_TRACE named"
        ) from None
    for problem in run.problems[:_MOST_PROBLEMS]:
        note(f"ioshape: {problem}")
    if len(run.problems) > _MOST_PROBLEMS:
        note(f"ioshape: and {len(run.problems) - _MOST_PROBLEMS:,} more of the kind")
    if not run.saves:
        raise SentenceError(
            f"{folder} has no reports of saves; a program writes them there if it runs with "
            f"IOSHAPE_TRACE={folder}"
        )
    return run


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


_FIGURES = (">saves", ">bytes", ">all done s", ">mean s", ">p99 s", ">training held s")
_WAITS = (">wait s", ">longest s", ">failed", ">skipped")


def _cells(gust: Gust) -> list[str]:
    seconds = (gust.makespan_s, gust.mean_s, gust.p99_s, gust.held_s)
    return [
        f"{len(gust.saves):,}",
        human_size(gust.n_bytes),
        *(f"{value:.3f}" for value in (*seconds, gust.waited_s, gust.most_waited_s)),
        f"{gust.failed:,}",
        f"{gust.skipped:,}",
    ]


def _show(found: list[Gust], chosen: int) -> None:
    table = Table(*columns(">storm", "<began", ">ranks", *_FIGURES, *_WAITS))
    first = max(0, len(found) - _MOST_ROWS)
    for number, gust in enumerate(found[first:], start=first + 1):
        table.add(str(number), _time(gust.began_s), f"{gust.ranks:,}", *_cells(gust))
    if first:
        say(f"The last {_MOST_ROWS} of {plural(len(found), 'storm')}; --json has all.")
    table.show()
    hosts = found[chosen].by_host()
    say()
    say(f"Storm {chosen + 1}, by host:")
    table = Table(*columns("<host", ">ranks", *_FIGURES, *_WAITS))
    for host, gust in list(hosts.items())[:_MOST_ROWS]:
        table.add(host, f"{gust.ranks:,}", *_cells(gust))
    table.show()
    if len(hosts) > _MOST_ROWS:
        say(f"and {len(hosts) - _MOST_ROWS} more")


def _gust_json(gust: Gust) -> dict[str, Any]:
    return {
        "saves": len(gust.saves),
        "ranks": gust.ranks,
        "bytes": gust.n_bytes,
        "began_s": gust.began_s,
        "makespan_s": gust.makespan_s,
        "mean_s": gust.mean_s,
        "p99_s": gust.p99_s,
        "training_held_s": gust.held_s,
        "mean_wait_s": gust.waited_s,
        "longest_wait_s": gust.most_waited_s,
        "failed": gust.failed,
        "skipped": gust.skipped,
    }


def _as_json(run: Run, found: list[Gust]) -> dict[str, Any]:
    return {
        "saves": len(run.saves),
        "problems": run.problems,
        "storms": [
            {
                **_gust_json(gust),
                "hosts": {host: _gust_json(one) for host, one in gust.by_host().items()},
            }
            for gust in found
        ],
    }


@click.command(short_help="Show and draw what the saves of a run did, from their reports.")
@click.argument("folder", type=click.Path())
@click.option(
    "--storm",
    "chosen",
    metavar="N",
    type=click.IntRange(min=1),
    help="Which one is drawn, and told by host.  [default: the one that took longest]",
)
@click.option(
    "--chrome",
    "chrome_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write all of it as a trace for Perfetto.",
)
@json_option
@plot_option
def command(
    folder: str,
    chosen: int | None,
    chrome_path: str | None,
    as_json: bool,
    plot_path: str | None,
) -> None:
    """Shows what the saves of a run did, from the reports that it has left in FOLDER.

    A program leaves them there if it runs with IOSHAPE_TRACE=FOLDER, or has called
    ioshape.configure(trace=FOLDER): each process writes a line for each save.

    A storm is what goes on from a moment when a save begins until nobody has saved for a second.
    Times of different hosts are by their own clocks.

    \b
    IOSHAPE_TRACE=/scratch/reports torchrun train.py
    ioshape trace /scratch/reports
    ioshape trace /scratch/reports --plot storm.svg --chrome storm.json

    Exit code: 0; 1 if a line is not a report, which is said on stderr.
    """
    from ioshape._cli.trace import reports  # noqa: PLC0415

    run = read_run(folder)
    found = reports.gusts(run.saves)
    if chosen is None:
        chosen = max(range(len(found)), key=lambda i: found[i].makespan_s) + 1
    if chosen > len(found):
        raise SentenceError(
            f"there {'is 1 storm' if len(found) == 1 else f'are {len(found):,} storms'}, and no "
            f"{chosen}; the table that comes without --storm numbers them"
        )
    if as_json:
        say_json(_as_json(run, found))
    else:
        _show(found, chosen - 1)
    _draw(found, chosen - 1, plot_path, chrome_path)
    click.get_current_context().exit(exit_for(bool(run.problems)))


def _draw(found: list[Gust], chosen: int, plot_path: str | None, chrome_path: str | None) -> None:
    from ioshape._cli.trace import chrome, plot, reports  # noqa: PLC0415
    from ioshape._cli.trace.timeline import Timeline  # noqa: PLC0415

    if plot_path is not None:
        gust = found[chosen]
        panel = reports.panel_of(gust, f"storm {chosen + 1}, {_time(gust.began_s)}")
        panel.remarks = [
            f"done after {human_seconds(gust.makespan_s)}",
            f"mean {human_seconds(gust.mean_s)}",
            f"training held {human_seconds(gust.held_s)}",
            f"longest wait {human_seconds(gust.most_waited_s)}",
        ]
        hosts = plural(len(gust.by_host()), "host")
        timeline = Timeline(
            f"{plural(gust.ranks, 'rank')} on {hosts} save {human_size(gust.n_bytes)}",
            [panel],
            f"storm {chosen + 1} of {len(found)}; hosts' clocks may differ",
        )
        plot.draw(timeline, plot_path)
    if chrome_path is not None:
        panels = [
            reports.panel_of(gust, f"storm {number}") for number, gust in enumerate(found, start=1)
        ]
        text = chrome.write(Timeline("ioshape trace", panels))
        Path(chrome_path).write_text(text, encoding="utf-8")
