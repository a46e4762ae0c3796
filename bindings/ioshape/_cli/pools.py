# SPDX-License-Identifier: Apache-2.0
"""Options, errors and output that the commands about pools of slots share."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import (
    Column,
    SentenceError,
    Table,
    UsageSentenceError,
    human_seconds,
    human_size,
    plural,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ioshape._cli.output import Option
    from ioshape._slots.pools import (
        Member,
        Operator,
        PoolLimit,
        PoolsLook,
        PoolStatus,
    )

NO_POOLS = "no pools: no job has asked this coordinator for a slot yet"

#: share of jobs that set none
USUAL_SHARE = 100

CAPACITY_BY = {
    "operator": "set by the operator",
    "job": "requested by a job",
    "default": "the default",
}


class AwayError(SentenceError):
    """The coordinator is unreachable. The error has its own exit code for scripts."""

    exit_code = 3


def _coordinator(
    _context: click.Context, _option: click.Parameter, address: str | None
) -> str | None:
    from ioshape._core import config  # noqa: PLC0415

    if address is None:
        return None
    if config.without_password(address) != address:
        raise UsageSentenceError(
            "all users of this machine can see a password in a command line, now also this one; "
            "give the address without it, and set IOSHAPE_PASSWORD or IOSHAPE_PASSWORD_FILE"
        )
    return str(config.SETTINGS["coordinator"].parse(address, "--coordinator"))


def pool_argument(
    _context: click.Context, _argument: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Raise UsageError if the name of a pool is an address.

    An address may contain a password, which error messages about the pool would print.
    """
    for name in (value,) if isinstance(value, str) else value or ():
        if "://" in name:
            raise click.UsageError("POOL is the name of a pool; give an address with --coordinator")
    return value


coordinator_option: Option = click.option(
    "--coordinator",
    metavar="ADDRESS",
    callback=_coordinator,
    help="Address of the coordinator, such as redis://host.  [default: from the settings]",
)


def operator_of(coordinator: str | None) -> Operator:
    """Connect to the coordinator of this address; None: to that of the settings."""
    from ioshape._core import config  # noqa: PLC0415
    from ioshape._slots.pools import Operator  # noqa: PLC0415

    if (coordinator or config.value_of("coordinator")) == "open":
        raise SentenceError(
            'the coordinator is "open", which has no pools; name another coordinator with '
            "--coordinator or in IOSHAPE_COORDINATOR"
        )
    try:
        return Operator(coordinator)
    except ImportError as error:
        raise SentenceError(str(error)) from error


@contextmanager
def sentences() -> Iterator[None]:
    """Turn a CoordinatorError in the block into an AwayError, which has exit code 3."""
    from ioshape.errors import CoordinatorError  # noqa: PLC0415

    try:
        yield
    except CoordinatorError as error:
        raise AwayError(str(error)) from error


def is_known(status: PoolStatus) -> bool:
    """Return whether a pool was ever used, or an operator has set something for it."""
    return bool(
        status.grants
        or status.holders
        or status.waiter_count
        or status.capacity_by == "operator"
        or status.pool_bytes_per_s
        or status.job_bytes_per_s
        or status.limits
    )


def _knows(operator: Operator, known: Sequence[str], pool: str) -> bool:
    # The coordinator's list may lack a pool that has settings but was not used for long.
    return pool in known or is_known(operator.status(pool))


def existing(operator: Operator, pools: Sequence[str]) -> list[str]:
    """Return these pools; if none are named, all known pools.

    Raises:
        SentenceError: the coordinator does not know one of them.
    """
    known = operator.names()
    for pool in pools:
        if not _knows(operator, known, pool):
            near = difflib.get_close_matches(pool, known, n=1)
            there = f"it has {', '.join(known)}" if known else "it has no pools yet"
            remedy = f'did you mean "{near[0]}"?' if near else there
            raise SentenceError(f'the coordinator has no pool "{pool}"; {remedy}')
    return list(pools) or known


# ---- Output -------------------------------------------------------------------------------------


def missing_lines(look: PoolsLook) -> list[str]:
    """Return a line for each pool without an answer, and one about pools beyond the limit."""
    lines = [f"{one.pool}: {one.error}" for one in look.failed]
    return [*lines, *left_out_lines(look)]


def left_out_lines(look: PoolsLook) -> list[str]:
    """Return a line about the pools beyond the limit, if there are any."""
    more = plural(look.left_out, "more pool")
    return [f"... and {more}; name the pools that you want to see"] if look.left_out else []


def check_answers(look: PoolsLook) -> None:
    """Raise AwayError with the first error if the coordinator answers for no pool."""
    if look.failed and not look.pools:
        raise AwayError(missing_lines(look)[0])


def headline(status: PoolStatus) -> str:
    """Return a line with the pool's name, capacity, used slots and waiters."""
    by = CAPACITY_BY.get(status.capacity_by, status.capacity_by)
    # The local coordinator does not count grants.
    grants = f"; {plural(status.grants, 'grant')} so far" if status.grants else ""
    return (
        f"{status.pool} ({status.coordinator}): "
        f"{status.used} of {plural(status.capacity, 'slot')} taken (capacity: {by}), "
        f"{status.waiter_count:,} waiting{grants}"
    )


def limits(status: PoolStatus) -> str:
    """Return a line with the other settings of a pool: bandwidth and small saves."""
    small = (
        f"saves of up to {human_size(status.small_bytes)} bypass the queue, {status.bypass} at a "
        "time"
    )
    if status.coordinator == "local":
        return f"first come, first served; {small}"
    pool, job = (
        f"{human_size(rate)}/s" if rate else "unlimited"
        for rate in (status.pool_bytes_per_s, status.job_bytes_per_s)
    )
    return f"bandwidth: {pool} for the pool, {job} for each job; {small}"


def limit_line(limit: PoolLimit) -> str:
    """Return a line with the limit of one job or user."""
    whom = f"job {limit.job}" if limit.job else f"user {limit.user}"
    share = [f"share {limit.share / USUAL_SHARE:g}"] if limit.share else []
    rate = [f"{human_size(limit.bytes_per_s)}/s"] if limit.bytes_per_s else []
    return f"limit of {whom}: {', '.join(share + rate)}"


def who(member: Member) -> str:
    """Return a phrase that names a holder or waiter, as the library's messages do."""
    return f"job {member.job}, rank {member.rank} on {member.node}"


def table_of(
    holders: Sequence[Member], waiters: Sequence[Member], rates: dict[str, float] | None = None
) -> Table:
    """Return a table of holders and waiters.

    Args:
        holders: the holders of slots.
        waiters: the writers in the queue.
        rates: bytes per second of holders, by id; None omits the column.
    """
    titles = [Column("state"), Column("job", cut=True), Column("node", optional=3, cut=True)]
    titles += [Column("rank", right=True), Column("slots", right=True, optional=5)]
    titles += [Column("written", right=True, optional=2), Column("of", right=True, optional=4)]
    titles += [Column("per second", right=True)] if rates is not None else []
    titles += [Column("for", right=True, optional=1), Column("lease", right=True, optional=6)]
    pids = any(one.pid for one in (*holders, *waiters))
    titles += [Column("pid", right=True, optional=7)] if pids else []
    table = Table(*titles, Column("id"))
    for state, members in (("holds", holders), ("waits", waiters)):
        for one in members:
            held = state == "holds"
            cells = [
                "bypass" if held and one.bypass else "urgent" if held and one.urgent else state,
                one.job,
                one.node,
                str(one.rank),
                str(one.weight),
                human_size(one.passed) if held else "",
                human_size(one.bytes) if one.bytes else "?",
            ]
            if rates is not None:
                cells.append(f"{human_size(rates[one.id])}/s" if one.id in rates else "")
            cells += [human_seconds(one.since_s), human_seconds(one.lease_s)]
            cells += [str(one.pid)] if pids else []
            table.add(*cells, one.id)
    return table


def not_shown(status: PoolStatus, holders: int, waiters: int) -> str:
    """Return a line about holders and waiters beyond these numbers; "" if there are none."""
    hold, wait = status.holder_count - holders, status.waiter_count - waiters
    rest = [f"{hold:,} more that hold slots"] if hold > 0 else []
    rest += [f"{wait:,} more that wait"] if wait > 0 else []
    return f"... and {', '.join(rest)}" if rest else ""
