# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape top": shows the state of pools live."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import human_size, remark, say
from ioshape._cli.pools import (
    NO_POOLS,
    AwayError,
    coordinator_option,
    existing,
    headline,
    limits,
    missing_lines,
    not_shown,
    operator_of,
    pool_argument,
    sentences,
    table_of,
)
from ioshape._core.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ioshape._cli.output import Table
    from ioshape._slots.pools import Member, Operator, PoolStatus

# Half of the rows of a pool that are printed when there is no terminal window.
_MOST_LISTED = 20
# Lines around a pool's table: a blank line, titles that may wrap, and the line about the rest.
_AROUND = 7
_LEAST_ROWS = 4
_EXIT_TERMINATED = 143
# Window of a pool's rate. It is longer than the usual time between two heartbeats.
_WINDOW_S = 10.0


class Rates:
    """Bytes per second of each holder, computed from successive samples.

    Holders report their bytes with each heartbeat, which is less often than samples are taken. So a
    rate covers the time between the last two reports, or since the last one if that is longer.
    """

    def __init__(self) -> None:
        #: by id: time and value of the last change of `passed`, time and value of the one before
        self._seen: dict[str, tuple[float, int, float, int]] = {}

    def sample(self, pools: Sequence[PoolStatus], now: float) -> dict[str, float]:
        """Return the rate of each holder, by id.

        At the first sample of a holder, the rate covers all the time for which it held its slot.
        """
        rates: dict[str, float] = {}
        seen: dict[str, tuple[float, int, float, int]] = {}
        for pool in pools:
            for one in pool.holders:
                # A new holder had written nothing when it got its slot.
                began = now - one.since_s
                at, passed, before, passed_before = self._seen.get(one.id, (began, 0, began, 0))
                if one.passed != passed:
                    at, passed, before, passed_before = now, one.passed, at, passed
                seen[one.id] = (at, passed, before, passed_before)
                span = max(at - before, now - at)
                rates[one.id] = max(0, passed - passed_before) / span if span > 0 else 0.0
        self._seen = seen
        return rates


def _written(pool: PoolStatus) -> int:
    """Return the bytes that were written in slots of a pool so far, including slots held now."""
    if pool.written_bytes:
        return pool.written_bytes + sum(one.passed for one in pool.holders)
    # With the local coordinator, the figures of jobs include the slots held now.
    return sum(job.written_bytes for job in pool.jobs)


class PoolRates:
    """Bytes per second of each pool, computed from successive samples.

    A writer reports its bytes with each heartbeat and with its release. A short save sends no
    heartbeat, so its bytes count when it releases its slot.
    """

    def __init__(self) -> None:
        #: by pool: times and bytes of the samples in the window, and of the last one before it
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def sample(self, pools: Sequence[PoolStatus], now: float) -> dict[str, float]:
        """Return the rate of each pool over the window; 0 at the first sample of a pool."""
        rates: dict[str, float] = {}
        seen: dict[str, list[tuple[float, int]]] = {}
        for pool in pools:
            samples = [*self._seen.get(pool.pool, ()), (now, _written(pool))]
            while len(samples) > 2 and samples[1][0] <= now - _WINDOW_S:
                del samples[0]
            (begin, before), (end, after) = samples[0], samples[-1]
            rates[pool.pool] = max(0, after - before) / (end - begin) if end > begin else 0.0
            seen[pool.pool] = samples
        self._seen = seen
        return rates


class _View:
    """The state to show: pools with their rates, and lines about problems."""

    def __init__(self, operator: Operator, wanted: Sequence[str]) -> None:
        self._operator = operator
        self._wanted = wanted
        self._rates = Rates()
        self._pool_rates = PoolRates()
        self._totals: dict[str, float] = {}
        self.pools: list[PoolStatus] = []
        self.rates: dict[str, float] = {}
        #: lines about pools that are not shown
        self.missing: list[str] = []
        self.problem = ""

    def begin(self) -> None:
        """Raise SentenceError now if the coordinator does not know one of the named pools."""
        with sentences():
            existing(self._operator, self._wanted)

    def look(self) -> None:
        """Take a sample. If the coordinator does not answer, `problem` says why."""
        try:
            with sentences():
                look = self._operator.look(self._wanted)
            now = time.monotonic()
            self.rates = self._rates.sample(look.pools, now)
            self._totals = self._pool_rates.sample(look.pools, now)
            self.pools = sorted(look.pools, key=self._activity)
            self.missing, self.problem = missing_lines(look), ""
        except AwayError as error:
            self.pools, self.rates, self.missing = [], {}, []
            self.problem = error.format_message()

    def _activity(self, pool: PoolStatus) -> tuple[object, ...]:
        """Return a sort key: pools with long queues first, then by rate, used slots and name."""
        return (-pool.waiter_count, -self.total(pool), -pool.used, pool.pool)

    def holders(self, pool: PoolStatus) -> list[Member]:
        """Return the holders of a pool, the fastest first."""
        return sorted(pool.holders, key=lambda one: -self.rates.get(one.id, 0.0))

    def total(self, pool: PoolStatus) -> float:
        """Return the bytes per second of a pool, including saves that have ended."""
        held = sum(self.rates.get(one.id, 0.0) for one in pool.holders)
        return max(held, self._totals.get(pool.pool, 0.0))

    def titles(self, pool: PoolStatus) -> list[str]:
        """Return the lines above a pool's table."""
        return [headline(pool), f"{human_size(self.total(pool))}/s now; {limits(pool)}"]


def _is_idle(pool: PoolStatus) -> bool:
    return not pool.holder_count and not pool.waiter_count


def _table(view: _View, pool: PoolStatus, most: int) -> tuple[Table, str]:
    """Return a table of at most `most` holders and waiters, and a line about the rest.

    Waiters get a third of the rows, or more if there are few holders.
    """
    waiters = pool.waiters[: max(most // 3, most - len(pool.holders))]
    holders = view.holders(pool)[: most - len(waiters)]
    rest = not_shown(pool, len(holders), len(waiters))
    return table_of(holders, waiters, view.rates), rest


def _print_plain(view: _View) -> None:
    for i, pool in enumerate(view.pools):
        if i:
            say()
        for line in view.titles(pool):
            say(line)
        table, rest = _table(view, pool, 2 * _MOST_LISTED)
        for line in table.lines() if table.rows else ():
            click.echo(line)
        if rest:
            say(rest)
    if not view.pools:
        say(NO_POOLS)
    for line in view.missing:
        say(line)


# ---- On a terminal ------------------------------------------------------------------------------


def _rendered(view: _View) -> Any:
    """Return the screen as an object of the package rich.

    rich cuts lines that do not fit at the end of the screen. So idle pools come last.
    """
    from rich.console import Group  # noqa: PLC0415 - takes longer than most commands
    from rich.text import Text  # noqa: PLC0415

    window = shutil.get_terminal_size()
    parts: list[Any] = [Text(f"ioshape top, {time.strftime('%H:%M:%S')}; press q to quit", "dim")]
    busy = [pool for pool in view.pools if not _is_idle(pool)]
    most = max(_LEAST_ROWS, window.lines // max(1, len(busy)) - _AROUND)
    for pool in busy:
        title, *more = view.titles(pool)
        table, rest = _table(view, pool, most)
        parts += [Text(), Text(one_line(title), "bold"), *(Text(one_line(line)) for line in more)]
        columns, *rows = table.fitted(window.columns).lines()
        parts += [Text(columns, "bold", no_wrap=True), *(Text(row, no_wrap=True) for row in rows)]
        if rest:
            parts.append(Text(rest, "dim"))
    idle = [pool.pool for pool in view.pools if _is_idle(pool)]
    if idle:
        parts += [Text(), Text(one_line(f"idle: {', '.join(idle)}"), "dim")]
    if view.problem:
        parts += [Text(), Text(one_line(view.problem), "bold red")]
    elif not view.pools:
        parts += [Text(), Text(NO_POOLS)]
    if view.missing:
        parts += [Text(), *(Text(one_line(line), "red") for line in view.missing)]
    return Group(*parts)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that sleeps for some seconds. It returns True at once if q is pressed."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios  # noqa: PLC0415
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def wait(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                typed = os.read(terminal, 64)
                if not typed or b"q" in typed.lower():
                    return True
        return False

    try:
        tty.setcbreak(terminal)
        yield wait
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _terminate(_signal: int, _frame: object) -> None:
    sys.exit(_EXIT_TERMINATED)  # raises SystemExit, so that the terminal is restored


def _watch_on_terminal(view: _View, interval: float) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    signal.signal(signal.SIGTERM, _terminate)
    view.look()
    live = Live(_rendered(view), console=Console(), screen=True, auto_refresh=False)
    with _keys() as wait, live:
        live.refresh()
        while not wait(interval):
            view.look()
            live.update(_rendered(view), refresh=True)


def _watch_in_lines(view: _View, interval: float) -> None:
    while True:
        view.look()
        if view.problem:
            remark(view.problem)
        else:
            _print_plain(view)
            say()
        sys.stdout.flush()
        time.sleep(interval)


@click.command(short_help="Show current and waiting writers, live.")
@click.argument("pools", metavar="[POOL]...", nargs=-1, callback=pool_argument)
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@coordinator_option
def command(pools: tuple[str, ...], interval: float, coordinator: str | None) -> int:
    """Show the current state of pools live: capacity, writers and their speed, waiting writers.

    Examples:

    \b
    ioshape top
    ioshape top lustre:scratch --interval 1

    Without names it shows the first 128 pools by name. Pools with a queue come
    first, then pools with writers, then idle ones. In each pool the fastest writers
    come first.

    On a terminal the screen is redrawn until you press q or Ctrl-C. Narrow windows
    have fewer columns, but always full ids, for "ioshape slots kick". In a pipe, each
    state is printed below the previous one. "ioshape slots status" prints the state
    once, also as JSON.

    If the coordinator does not answer for a pool, a line says so.

    Exit code: 0, also after Ctrl-C; 1 if there is no such pool; 3 if the coordinator
    is unreachable at the start. If that happens later, the command waits for the
    coordinator.
    """
    with sentences():
        view = _View(operator_of(coordinator), pools)
    view.begin()
    try:
        if sys.stdout.isatty():
            _watch_on_terminal(view, interval)
        else:
            _watch_in_lines(view, interval)
    except KeyboardInterrupt:
        pass
    return 0
