# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape doctor": prints facts about a path and this process, and findings.

doctor_facts.py gathers the facts; doctor_findings.py derives the findings from them.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    SentenceError,
    Table,
    UsageSentenceError,
    bytes_option,
    columns,
    human_size,
    json_option,
    plural,
    say,
    say_json,
)
from ioshape._cli.pools import coordinator_option

if TYPE_CHECKING:
    from ioshape._cli.doctor_facts import Facts, Near
    from ioshape._cli.doctor_findings import Finding
    from ioshape._probe import Storage

#: exit code if a finding is serious
EXIT_SERIOUS = 4

_MOST_RANKS = 1 << 20


def _sections(facts: Facts) -> list[tuple[str, list[tuple[str, str]]]]:
    return [
        ("storage", _underneath(facts)),
        (f"a save of {human_size(facts.storage.for_bytes)}", _plan(facts)),
        *([("the tier", _tier(facts.tier))] if facts.tier is not None else []),
        ("slots", _slots(facts)),
        ("this process", _process(facts)),
    ]


def _tier(tier: Near) -> list[tuple[str, str]]:
    if not tier.usable:
        return [("folder", f"{tier.folder}, which saves cannot use")]
    waiting = human_size(tier.waiting_bytes) if tier.waiting else "nothing"
    return [
        ("folder", tier.folder),
        ("space", f"{human_size(tier.free_bytes)} free"),
        ("waiting", waiting + (", being drained now" if tier.draining else "")),
    ]


def _underneath(facts: Facts) -> list[tuple[str, str]]:
    storage, folder = facts.storage, facts.folder
    # FUSE may hide another family, such as Lustre, behind its type. Then the family is shown.
    own = storage.family == "other" or storage.family in storage.type
    what = storage.type if own else storage.family
    rows = [
        ("filesystem", what),
        ("source", storage.source),
        ("mounted at", storage.mount_point),
        ("options", ",".join(dict.fromkeys(storage.options.split(",")))),
        ("space", _space(storage.total_bytes, storage.free_bytes)),
        ("inodes", f"{folder.inodes_free:,} of {folder.inodes:,} free" if folder.inodes else ""),
        ("shared", "with other hosts" if storage.remote else "no, local to this host"),
        ("direct I/O", _direct(storage)),
        ("targets", f"{storage.target_count:,}" if storage.target_count else ""),
        ("new files", _layout(storage.stripes, storage)),
        ("this file", storage.file_stripes),
    ]
    return [(name, value) for name, value in rows if value]


def _space(total: int, free: int) -> str:
    if not total:
        return "not reported"
    return f"{human_size(free)} of {human_size(total)} free"


def _direct(storage: Storage) -> str:
    if storage.direct is False:
        return "not supported"
    works = "works" if storage.direct else "support not reported"
    if storage.offset_alignment:
        works += (
            f"; memory aligned to {storage.memory_alignment} bytes, offsets to "
            f"{storage.offset_alignment}"
        )
    return works


def _layout(stripes: str, storage: Storage) -> str:
    if not stripes:
        return ""
    copies = f", {storage.mirrors} copies" if storage.mirrors > 1 else ""
    return f"{stripes}{copies}"


def _plan(facts: Facts) -> list[tuple[str, str]]:
    storage = facts.storage
    rows = [
        ("engine", storage.engine),
        ("because", storage.choice),
        ("note", storage.engine_note),
        (
            "requests",
            f"{human_size(storage.block_bytes)} each, in {plural(storage.queue_depth, 'buffer')}",
        ),
        ("layout", _asked(storage)),
        ("together with", plural(facts.files - 1, "other file") if facts.files > 1 else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _asked(storage: Storage) -> str:
    if not storage.stripes and not storage.stripes_asked:
        return ""
    asked = storage.stripes_asked or "that of the directory"
    return f"{asked}: {storage.stripes_why}" if storage.stripes_why else asked


def _slots(facts: Facts) -> list[tuple[str, str]]:
    storage, it = facts.storage, facts.coordination
    rows = [("coordinator", it.address), ("pool", storage.pool)]
    if it.unasked:
        rows.append(("not asked", "install the package redis: pip install 'ioshape[redis]'"))
    elif it.error:
        rows.append(("unreachable", it.error))
    elif it.latency_s:
        rows[0] = ("coordinator", f"{it.address}, answered in {it.latency_s * 1000:,.1f} ms")
    if storage.writers:
        rows.append(("default capacity", f"{storage.writers}: {storage.writers_why}"))
    return [(name, value) for name, value in rows if value]


def _process(facts: Facts) -> list[tuple[str, str]]:
    host, it = facts.host, facts.installation
    free = host.shared_bytes
    rows = [
        ("kernel", host.kernel),
        ("container", host.container),
        ("system calls", "filtered (seccomp)" if host.seccomp else ""),
        ("locked memory", _most(host.memlock_bytes)),
        ("/dev/shm", "not writable" if free is None else f"{human_size(free)} free"),
        ("Python", it.python),
        ("ioshape", it.ioshape),
        ("torch", it.torch or "not installed"),
    ]
    return [(name, value) for name, value in rows if value]


def _most(limit: int | None) -> str:
    return "no limit" if limit is None else f"{human_size(limit)} at most"


def _show_targets(storage: Storage) -> None:
    table = Table(*columns("<target", ">size", ">free", ">full"))
    for one in sorted(storage.targets, key=lambda one: one.name):
        used = 1 - one.free_bytes / one.total_bytes if one.total_bytes else 0.0
        table.add(one.name, human_size(one.total_bytes), human_size(one.free_bytes), f"{used:.0%}")
    table.show()
    rest = storage.target_count - len(storage.targets)
    if rest > 0:
        say(f"... and {plural(rest, 'target')} more")


def _show(facts: Facts, findings: list[Finding]) -> None:
    for title, rows in _sections(facts):
        table = Table(*columns(f"<{title}", "<"))
        for name, value in rows:
            table.add(f"  {name}", value)
        table.show()
        say()
    if facts.storage.targets:
        _show_targets(facts.storage)
        say()
    for finding in findings:
        say(f"{finding.severity}: {finding.sentence}; {finding.remedy}")
    if not findings:
        say("no findings")


def _as_json(path: str, facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    return {"path": path, **asdict(facts), "findings": [asdict(finding) for finding in findings]}


@click.command(short_help="Diagnose this machine and a path.")
@click.argument("path", default=".", type=click.Path(readable=False))
@click.option(
    "--for",
    "n_bytes",
    metavar="BYTES",
    callback=bytes_option,
    help="Size of a checkpoint file, such as 80G.  [default: 4G]",
)
@click.option(
    "--ranks",
    metavar="N",
    type=click.IntRange(1, _MOST_RANKS),
    help="Number of ranks that save together.  [default: from the launcher, or 1]",
)
@json_option
@coordinator_option
def command(
    path: str,
    n_bytes: int,
    ranks: int | None,
    as_json: bool,
    coordinator: str | None,
) -> int:
    """Diagnose this machine and PATH. Findings are sorted by impact.

    It examines PATH: its filesystem, and how a save would write there and why. It also examines
    this process (limits, io_uring, memory, versions) and the coordinator. If PATH is a tier,
    or the settings name one, it examines the tier, too.

    PATH is a directory or a file. If it does not exist, its directory must exist. Nothing is
    written. Each finding has a remedy. A finding is "serious" if a save would fail, or be lost
    later.

    The settings are those that "ioshape settings" shows. Limits and memory are those of this
    process. To diagnose a job, run the command where the job runs.

    Examples:

    \b
    ioshape doctor /scratch/run7
    ioshape doctor /scratch/run7 --for 80G --ranks 256
    ioshape doctor /scratch/run7 --json | jq '.findings[].id'
    srun --ntasks-per-node 1 ioshape doctor /scratch/run7

    Exit code: 0; 1 if PATH cannot be examined; 2 if a setting is invalid; 4 if a finding is
    serious.
    """
    from ioshape._cli.doctor_facts import look  # noqa: PLC0415
    from ioshape._cli.doctor_findings import triage  # noqa: PLC0415
    from ioshape._core import config  # noqa: PLC0415

    if not path:
        raise SentenceError("the path is empty; name a directory, or a file in one")
    wrong = config.mistakes()
    if wrong:
        raise UsageSentenceError("\n".join(wrong))
    facts = look(path, n_bytes=n_bytes, ranks=ranks or 0, coordinator=coordinator)
    findings = triage(facts)
    if as_json:
        say_json(_as_json(os.path.abspath(path), facts, findings))  # noqa: PTH100
    else:
        _show(facts, findings)
    serious = any(finding.severity == "serious" for finding in findings)
    return EXIT_SERIOUS if serious else 0
