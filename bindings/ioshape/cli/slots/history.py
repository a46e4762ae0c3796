# SPDX-License-Identifier: Apache-2.0
"""ioshape slots history: who used a pool, and when."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ioshape.cli.output import Column, Table, human_seconds, human_size, note, say, say_json
from ioshape.cli.slots.pools import (
    act_line,
    completed_pool,
    coordinator_option,
    existing,
    operator_of,
    pool_argument,
    sentences,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ioshape._slots.pools import PoolHour

_UNITS = {"h": 1, "d": 24}
_MOST_HOURS = 30 * 24
_OTHERS = "(others)"


def _hours(_context: click.Context, _option: click.Parameter, text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit()) or unit not in _UNITS:
        raise click.BadParameter(f"{text!r} is no time such as 12h or 7d")
    hours = int(number) * _UNITS[unit]
    if not 1 <= hours <= _MOST_HOURS:
        raise click.BadParameter(f"{text!r} is not between 1h and 30d, which is all that is kept")
    return hours


def _key(hour: PoolHour, by: str) -> tuple[str, ...]:
    """What is added up to one row."""
    if by == "hour":
        return (time.strftime("%Y-%m-%d %H:%M", time.localtime(hour.begin_s)),)
    job, user = hour.job or _OTHERS, hour.user if hour.job else _OTHERS
    return (user or "?",) if by == "user" else (job, user or "?")


def _table(hours: Iterable[PoolHour], by: str) -> Table:
    sums: dict[tuple[str, ...], list[float]] = {}
    for hour in hours:
        row = sums.setdefault(_key(hour, by), [0, 0, 0, 0])
        used = (hour.written_bytes, hour.writes, hour.held_s, hour.waited_s)
        row[:] = [before + more for before, more in zip(row, used, strict=True)]
    titles = ["job", "user"] if by == "job" else [by]
    table = Table(
        *(Column(title, cut=True) for title in titles),
        *(Column(title, right=True) for title in ("written", "slots", "held", "waited")),
    )
    # Hours are in order; else who wrote most is first.
    order = list(sums) if by == "hour" else sorted(sums, key=lambda key: (-sums[key][0], key))
    for key in order:
        written, writes, held_s, waited_s = sums[key]
        times = human_seconds(held_s), human_seconds(waited_s)
        table.add(*key, human_size(written), f"{int(writes):,}", *times)
    return table


def _show(pool: str, hours: Sequence[PoolHour], by: str) -> None:
    if hours:
        _table(hours, by).show()
    else:
        note(f"nobody wrote in slots of {pool} in that time")


@click.command("history", short_help="Show who used a pool, and when.")
@click.argument("pool", callback=pool_argument, shell_complete=completed_pool)
@click.option(
    "--since",
    "hours",
    callback=_hours,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="So many hours or days up to now, such as 12h or 7d; 30d at most.",
)
@click.option(
    "--by",
    type=click.Choice(["job", "user", "hour"]),
    default="job",
    show_default=True,
    help="What is added up in a row.",
)
@click.option("--json", "in_json", is_flag=True, help="Print each job's hours, as JSON.")
@coordinator_option
def history(pool: str, hours: int, by: str, in_json: bool, coordinator: str | None) -> None:
    """Shows what was written in slots of a pool, how long they were held and waited for.

    \b
    ioshape slots history lustre:scratch
    ioshape slots history lustre:scratch --since 7d --by user
    ioshape slots history lustre:scratch --since 30d --json

    Who wrote most is first; below are changes by operators, and who made them. A save
    counts in the hour in which it gives its slot back. The first 128 jobs of
    an hour have rows of their own. Needs a Redis, which keeps it for 30 days.
    Names are as jobs say them.

    Exit code: 0; 1 if there is no such pool, or no history; 3 if the coordinator is
    unreachable.
    """
    with sentences():
        operator = operator_of(coordinator)
        existing(operator, [pool])
        found = operator.history(pool, hours)
    since_s = time.time() - hours * 3600
    acts = [act for act in found.acts if act.at_s >= since_s]
    if in_json:
        say_json(
            {
                "pool": pool,
                "hours": [asdict(hour) for hour in found.hours],
                "acts": [asdict(act) for act in acts],
            }
        )
        return
    _show(pool, found.hours, by)
    if acts:
        say()
    for act in acts:
        say(act_line(act, "change"))
