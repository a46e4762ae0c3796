# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape slots": shows pools of slots, changes their settings, and revokes slots."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import (
    SentenceError,
    UsageSentenceError,
    bytes_option,
    json_option,
    remark,
    say,
    say_json,
)
from ioshape._cli.pools import (
    NO_POOLS,
    USUAL_SHARE,
    check_answers,
    coordinator_option,
    existing,
    headline,
    left_out_lines,
    limit_line,
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
    from ioshape._cli.output import Option
    from ioshape._slots.pools import PoolStatus

_MOST = 65536

_pool_argument: Option = click.argument("pool", callback=pool_argument)


def _show_settings(status: PoolStatus) -> None:
    say(headline(status))
    say(limits(status))
    for limit in status.limits:
        say(limit_line(limit))


def _check_limit(job: str, user: str, has_share: bool, has_others: bool) -> None:
    if job and user:
        raise click.UsageError("give --job or --user, not both")
    if has_share and not (job or user):
        raise click.UsageError("--share is for one job or user; name it with --job or --user")
    if has_others and (job or user):
        raise click.UsageError("only --share and --rate can be set for one job or user")


def _show(status: PoolStatus) -> None:
    _show_settings(status)
    if status.holders or status.waiters:
        say()
        table_of(status.holders, status.waiters).show()
    if rest := not_shown(status, len(status.holders), len(status.waiters)):
        say(rest)


@click.group(short_help="Show and set pools of slots.", no_args_is_help=False)
def command() -> None:
    """Show the pools of slots that writers wait for, and set how many may write.

    \b
    ioshape slots status                  - all pools
    ioshape slots status --path /scratch  - the pool of a filesystem
    ioshape slots set lustre:scratch --capacity 8

    Settings of the operator override those of jobs, and stay until they are
    cleared. "ioshape slots COMMAND --help" explains a command.

    Exit code: 0; 1 if there is no such pool or id; 3 if the coordinator is
    unreachable.
    """


@command.command(short_help="Show pools: capacity, slot holders and waiting writers.")
@click.argument("pool", required=False, callback=pool_argument)
@click.option("--path", type=click.Path(), help="Show the pool of the filesystem of this path.")
@json_option
@coordinator_option
def status(pool: str | None, path: str | None, as_json: bool, coordinator: str | None) -> None:
    """Show a pool, or all pools that the coordinator knows: slot holders and waiting writers.

    Examples:

    \b
    ioshape slots status
    ioshape slots status lustre:scratch
    ioshape slots status --path /scratch/run7 --json

    Without a name it shows the first 128 pools by name. If the coordinator does not
    answer for a pool, a line gives the reason; in JSON "pool" and "error".

    Exit code: 0; 1 if there is no such pool; 3 if the coordinator is unreachable, or
    answers for none of the pools.
    """
    if pool and path:
        raise click.UsageError("give a pool or --path, not both")
    with sentences():
        operator = operator_of(coordinator)
        if path:
            pool = operator.name_for(path)
        wanted = existing(operator, [pool]) if pool else []
        look = operator.look(wanted)
    check_answers(look)
    if as_json:
        say_json([*map(asdict, look.pools), *map(asdict, look.failed)])
        for line in left_out_lines(look):
            remark(line)
        return
    for i, one in enumerate(look.pools):
        if i:
            say()
        _show(one)
    for line in missing_lines(look):
        say(line)
    if not look.pools:
        remark(NO_POOLS)


@command.command("set", short_help="Set the capacity and the bandwidth of a pool.")
@_pool_argument
@click.option("--capacity", type=click.IntRange(1, _MOST), metavar="N", help="Number of slots.")
@click.option(
    "--rate",
    "pool_bytes_per_s",
    metavar="BYTES",
    callback=bytes_option,
    help="Bandwidth limit of all jobs together, per second.",
)
@click.option(
    "--job-rate",
    "job_bytes_per_s",
    metavar="BYTES",
    callback=bytes_option,
    help="Bandwidth limit of each job, per second.",
)
@click.option(
    "--small",
    "small_bytes",
    metavar="BYTES",
    callback=bytes_option,
    help="Saves of up to this size may bypass the queue.",
)
@click.option(
    "--bypass",
    "--express",  # its name before version 0.3
    "bypass",
    type=click.IntRange(1, _MOST),
    metavar="N",
    help="Number of small saves that bypass the queue at a time.",
)
@click.option("--job", default="", metavar="NAME", help="Set the limit of this job only.")
@click.option(
    "--user", default="", metavar="NAME", help="Set the limit of the jobs of this user only."
)
@click.option(
    "--share",
    type=click.FloatRange(0.01, 100),
    metavar="FACTOR",
    help="Share of that job or user: 0.5 is half of the usual share.",
)
@coordinator_option
def set_(
    pool: str,
    capacity: int | None,
    pool_bytes_per_s: int,
    job_bytes_per_s: int,
    small_bytes: int,
    bypass: int | None,
    job: str,
    user: str,
    share: float | None,
    coordinator: str | None,
) -> None:
    """Set the named values for current and future jobs. Other values stay unchanged.

    Examples:

    \b
    ioshape slots set lustre:scratch --capacity 8
    ioshape slots set lustre:scratch --rate 20G --job-rate 5G
    ioshape slots set lustre:scratch --job 4711 --share 0.5 --rate 1G

    They override values of jobs. They stay until "ioshape slots clear". Holders keep
    their slots. You can set a pool before the first job uses it: "ioshape slots
    status --path DIRECTORY" names the pool of a directory. Sizes are bytes, such as
    500M. This needs a Redis: with "local", each job sets its capacity (IOSHAPE_SLOTS).

    With --job or --user it limits the share and the rate of that job or user,
    whatever the job sets itself. All jobs of a user share the user's rate. Limits
    take effect with the next request; limits of bandwidth within ten seconds.

    Exit code: 0; 1 if there is no such pool; 3 if the coordinator is unreachable.
    """
    of_pool = (capacity, job_bytes_per_s, small_bytes, bypass)
    if not any((*of_pool, pool_bytes_per_s, share)):
        raise click.UsageError("nothing to set; name at least one option")
    _check_limit(job, user, share is not None, any(of_pool))
    if job or user:
        pool_bytes_per_s, job_bytes_per_s = 0, pool_bytes_per_s
    with sentences():
        operator = operator_of(coordinator)
        operator.set(
            pool,
            capacity=capacity or 0,
            pool_bytes_per_s=pool_bytes_per_s,
            job_bytes_per_s=job_bytes_per_s,
            small_bytes=small_bytes,
            bypass=bypass or 0,
            job=job,
            user=user,
            share=round((share or 0) * USUAL_SHARE),
        )
        now = operator.status(pool)
    _show_settings(now)


@command.command(short_help="Clear the settings of a pool.")
@_pool_argument
@click.option("--job", default="", metavar="NAME", help="Clear only the limit of this job.")
@click.option("--user", default="", metavar="NAME", help="Clear only the limit of this user.")
@coordinator_option
def clear(pool: str, job: str, user: str, coordinator: str | None) -> None:
    """Clear the settings that "ioshape slots set" made for a pool: jobs and defaults decide again.

    Examples:

    \b
    ioshape slots clear lustre:scratch
    ioshape slots clear lustre:scratch --job 4711

    Limits for one job or user stay until they are cleared by name.

    Exit code: 0; 1 if there is no such pool; 3 if the coordinator is unreachable.
    """
    with sentences():
        operator = operator_of(coordinator)
        existing(operator, [pool])
        operator.set(pool, clear=True, job=job, user=user)
        now = operator.status(pool)
    _show_settings(now)


@command.command(short_help="Revoke the slot of a writer.")
@_pool_argument
@click.argument("member", metavar="ID")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@coordinator_option
def kick(pool: str, member: str, yes: bool, coordinator: str | None) -> None:
    """Revoke the slot, or the position in the queue, of the writer with this id.

    \b
    ioshape slots kick lustre:scratch 9f86d081884c7d65-3

    "ioshape slots status" shows ids. The next writer in the queue gets the slot. The
    save that had it continues without a slot, and its report says so. No data is
    lost, but one more save writes at the same time. A waiting writer has to ask
    again, and comes last. The command asks for confirmation. It needs a Redis: with
    "local", end the process that the status names.

    Exit code: 0; 1 if there is no such pool or id, or the answer was no; 3 if the
    coordinator is unreachable.
    """
    with sentences():
        operator = operator_of(coordinator)
        existing(operator, [pool])
        if not yes:
            if not sys.stdin.isatty():
                raise UsageSentenceError(
                    "cannot ask for confirmation: there is no terminal; add --yes"
                )
            if not click.confirm(one_line(f"Revoke {member} in {pool}?"), err=True):
                raise SentenceError("nothing was revoked")
        operator.kick(pool, member)
    say(f"{member}: revoked; its save continues without a slot, or asks again if it waited")
