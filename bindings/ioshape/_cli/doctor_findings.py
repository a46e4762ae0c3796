# SPDX-License-Identifier: Apache-2.0
"""Findings of "ioshape doctor": a table (ROWS), sorted by impact, and functions that it uses.

Each row has a condition on the facts, a sentence and a remedy. Texts that only insert facts are
templates; others are functions of the facts.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ioshape._cli.output import human_seconds, human_size, plural

if TYPE_CHECKING:
    from ioshape._cli.doctor_facts import Facts, Near

#: "serious": a save would fail, be lost, or be wrong. "warning": saves are slow, or it may become
#: serious soon.
Severity = Literal["serious", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "hint")


@dataclass(frozen=True)
class Finding:
    """A finding with its remedy, as the user sees it."""

    #: stable name for programs
    id: str
    severity: Severity
    sentence: str
    #: what the user or an administrator can do
    remedy: str


class Row(NamedTuple):
    """A row of the table: a possible finding with its condition."""

    id: str
    severity: Severity | Callable[[Facts], Severity]
    when: Callable[[Facts], bool]
    #: templates can use the members of Facts, "where" and "user"
    sentence: str | Callable[[Facts], str]
    remedy: str | Callable[[Facts], str]


def triage(facts: Facts) -> list[Finding]:
    """Return all findings: the most severe first, and within a severity by impact."""
    found = [_finding(row, facts) for row in ROWS if row.when(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _finding(row: Row, facts: Facts) -> Finding:
    names = {**vars(facts), "where": _where(facts), "user": facts.host.user or "this user"}

    def text(template: str | Callable[[Facts], str]) -> str:
        return template(facts) if callable(template) else template.format(**names)

    severity = row.severity(facts) if callable(row.severity) else row.severity
    return Finding(row.id, severity, text(row.sentence), text(row.remedy))


def _where(facts: Facts) -> str:
    """Return the mount point; if it is unknown, the directory."""
    return facts.storage.mount_point or facts.folder.path


_MIB = 1 << 20

# ---- Space --------------------------------------------------------------------------------------

#: used share of the space above which filesystems allocate slowly and unevenly
_FULL = 0.85
_VERY_FULL = 0.95
_FEW_INODES = 1000


def _used(total: int, free: int) -> float:
    """Return the used share, from 0 to 1; 0 if the size is not known."""
    return 1 - min(free, total) / total if total else 0.0


def _used_here(facts: Facts) -> float:
    return _used(facts.storage.total_bytes, facts.storage.free_bytes)


def _needed(facts: Facts) -> int:
    return facts.storage.for_bytes * facts.files_here


def _no_space(facts: Facts) -> bool:
    return bool(facts.storage.total_bytes) and facts.storage.free_bytes < _needed(facts)


def _no_space_sentence(facts: Facts) -> str:
    free, needed = human_size(facts.storage.free_bytes), human_size(_needed(facts))
    if facts.files_here == 1:
        return (
            f"a save of {needed} does not fit into the {free} of free space; the previous file is "
            "removed only after the new one is complete"
        )
    return (
        f"a checkpoint of {facts.files_here:,} files, {needed} together, does not fit into the "
        f"{free} of free space; the previous files are removed only after the new ones are complete"
    )


def _few_inodes(facts: Facts) -> bool:
    free, count = facts.folder.inodes_free, facts.folder.inodes
    return bool(count) and (free < _FEW_INODES or _used(count, free) > _VERY_FULL)


def _targets(facts: Facts) -> list[tuple[str, float]]:
    """Return the names and used shares of the targets of known size, the fullest first."""
    listed = [one for one in facts.storage.targets if one.total_bytes]
    used = [(one.name, _used(one.total_bytes, one.free_bytes)) for one in listed]
    return sorted(used, key=lambda one: -one[1])


def _full_targets(facts: Facts) -> int:
    return sum(used > _FULL for _, used in _targets(facts))


def _target_full_sentence(facts: Facts) -> str:
    count, (name, used) = _full_targets(facts), _targets(facts)[0]
    are = "is" if count == 1 else "are"
    return (
        f"{plural(count, 'target')} of {len(_targets(facts))} {are} more than {_FULL:.0%} full, "
        f"{name} {used:.0%}: writing a file with a stripe on a full target fails, even if other "
        "targets have free space"
    )


# ---- The mount and the directory ----------------------------------------------------------------

_MEMORY_TYPES = ("tmpfs", "ramfs", "devtmpfs")


def _options(facts: Facts) -> dict[str, str]:
    """Return the mount options with their values; "" for an option without a value."""
    parts = (option.partition("=") for option in facts.storage.options.split(",") if option)
    return {name: value for name, _, value in parts}


def _no_barrier(facts: Facts) -> bool:
    options = _options(facts)
    return "nobarrier" in options or options.get("barrier") == "0"


def _in_layer(facts: Facts) -> bool:
    """Return whether an overlay seems to be the writable layer of a container."""
    return facts.storage.mount_point in ("/", "") or bool(facts.host.container)


def _in_memory(facts: Facts) -> bool:
    return facts.storage.type in _MEMORY_TYPES or facts.storage.family == "tmpfs"


def _nfs(found: Callable[[dict[str, str]], bool]) -> Callable[[Facts], bool]:
    """Return a condition that is true only on NFS and if `found` is true of the mount options."""
    return lambda facts: facts.storage.family == "nfs" and found(_options(facts))


# ---- The tier -----------------------------------------------------------------------------------

_LONG_S = 3600.0


def _tier(when: Callable[[Near, Facts], bool]) -> Callable[[Facts], bool]:
    """Return a condition that is true only if there is a usable tier and `when` is true."""
    return lambda facts: facts.tier is not None and facts.tier.usable and when(facts.tier, facts)


def _tier_not_local_sentence(facts: Facts) -> str:
    assert facts.tier is not None
    where = "is shared with other hosts" if facts.tier.remote else "is also that of the destination"
    return (
        f"the filesystem of the tier {facts.tier.folder} {where}: each save is written there "
        "twice, without any gain"
    )


def _tier_waits_sentence(facts: Facts) -> str:
    tier = facts.tier
    assert tier is not None
    return (
        f"{plural(tier.waiting, 'checkpoint')} ({human_size(tier.waiting_bytes)}) on the tier "
        f"{tier.folder} {'has' if tier.waiting == 1 else 'have'} waited to be drained for "
        f"{human_seconds(tier.oldest_s)}, and no process drains the tier: only this node has the "
        "data"
    )


# ---- The host -----------------------------------------------------------------------------------

_LITTLE_SHARED = 16 * _MIB


def _no_uring(facts: Facts) -> tuple[str, str]:
    """Return the reason why io_uring is refused, and the remedy."""
    code, host = facts.storage.uring_errno, facts.host
    if code in (errno.EPERM, errno.EACCES) and host.uring_disabled:
        who = (
            "to all processes"
            if host.uring_disabled > 1
            else "to processes outside kernel.io_uring_group"
        )
        return (
            f"the sysctl kernel.io_uring_disabled={host.uring_disabled} denies it {who}",
            "ask the administrator to set it to 0",
        )
    if host.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return (
            "the seccomp profile of this process denies it",
            "allow io_uring_setup, io_uring_enter and io_uring_register in the profile",
        )
    if code == errno.ENOSYS:
        kernel = host.kernel or "of an unknown version"
        return f"the kernel ({kernel}) does not support it", "use Linux 5.10 or newer"
    if code == errno.ENOMEM:
        return (
            "the limit of locked memory (RLIMIT_MEMLOCK) is too low",
            "raise it with ulimit -l, or start the container with --ulimit memlock=-1",
        )
    return os.strerror(code), "ask the administrator of this host"


def _file_limit_sentence(facts: Facts) -> str:
    return (
        f"this process cannot create files larger than {human_size(facts.host.file_bytes or 0)} "
        f"(RLIMIT_FSIZE), so a save of {human_size(facts.storage.for_bytes)} would fail"
    )


def _staged(facts: Facts) -> int:
    """Return the most staging memory of background saves of this host, in bytes."""
    held = min(facts.host.staging_bytes, facts.storage.for_bytes)
    return held * max(facts.host.local_ranks, 1)


def _memory_left(facts: Facts) -> int:
    return max(0, (facts.host.memory_bytes or 0) - facts.host.memory_used)


def _staging_sentence(facts: Facts) -> str:
    return (
        f"background saves of {plural(max(facts.host.local_ranks, 1), 'rank')} on this host may "
        f"use {human_size(_staged(facts))} of memory, but {human_size(_memory_left(facts))} is "
        f"left of the {human_size(facts.host.memory_bytes or 0)} of the container: the kernel "
        "kills processes that exceed the limit"
    )


def _stage_less(facts: Facts) -> str:
    share = _memory_left(facts) // 2 // max(facts.host.local_ranks, 1)
    return f"set IOSHAPE_STAGING_BYTES={max(64, share // _MIB)}M, or raise the container's limit"


def _little_shared(facts: Facts) -> bool:
    free = facts.host.shared_bytes
    return free is None or free < _LITTLE_SHARED


def _shared_sentence(facts: Facts) -> str:
    free = facts.host.shared_bytes
    why = "/dev/shm is missing or not writable for this user"
    if free is not None:
        why = f"/dev/shm has {human_size(free)} left"
    return f"{why}: ranks of this host exchange messages and slots through files elsewhere"


# ---- The coordinator, and what is installed -----------------------------------------------------


#: phrases for what saves do while the coordinator is unreachable, by the setting "unreachable"
_MEANWHILE = {
    "fail": "saves fail until it is back (unreachable=fail)",
    "wait": "saves wait until it is back (unreachable=wait)",
    "stagger": ("saves continue, each after a random delay (unreachable=stagger)"),
}


def _away_sentence(facts: Facts) -> str:
    it = facts.coordination
    then = _MEANWHILE.get(it.unreachable, _MEANWHILE["stagger"])
    return f"the coordinator {it.address} is unreachable: {it.error}; {then}"


def _is_spread(facts: Facts) -> bool:
    """Return whether there are ranks on other hosts."""
    return facts.ranks > max(facts.host.local_ranks, 1)


def _unordered_sentence(facts: Facts) -> str:
    who = "only the processes of this host share slots"
    if facts.coordination.kind == "open":
        who = "no coordinator limits the writers (coordinator=open)"
    return f"other hosts also write to this filesystem, but {who}"


_LIMIT_PASSWORD = (
    "change the file's group to one with all users of the coordinator, then its mode to 440"
)


def _password_unreadable(facts: Facts) -> bool:
    return bool(facts.installation.password_problem) and facts.coordination.kind == "redis"


def _password_readable(facts: Facts) -> bool:
    mode = facts.installation.password_mode
    return mode is not None and bool(mode & stat.S_IROTH) and not _password_unreadable(facts)


# ---- The table ----------------------------------------------------------------------------------

ROWS: tuple[Row, ...] = (
    # Saves fail now, or are lost.
    Row(
        "read-only",
        "serious",
        lambda facts: facts.folder.read_only,
        "{where} is mounted read-only; the kernel does this after disk errors",
        "look for errors in the kernel log, and mount it writable",
    ),
    Row(
        "not-writable",
        "serious",
        lambda facts: not facts.folder.writable and not facts.folder.read_only,
        "{user} cannot create files in {folder.path}",
        "choose another directory, or ask its owner for permission",
    ),
    Row(
        "no-space",
        "serious",
        _no_space,
        _no_space_sentence,
        "remove files, or set IOSHAPE_FULL=skip to skip checkpoints that do not fit",
    ),
    Row(
        "few-inodes",
        lambda facts: "serious" if facts.folder.inodes_free < _FEW_INODES else "warning",
        _few_inodes,
        "{folder.inodes_free:,} of {folder.inodes:,} inodes are free; without a free inode no file "
        "can be created, even if there is free space",
        "remove small files",
    ),
    Row(
        "file-size-limit",
        "serious",
        lambda facts: (
            facts.host.file_bytes is not None and facts.host.file_bytes < facts.storage.for_bytes
        ),
        _file_limit_sentence,
        "raise the limit with ulimit -f unlimited",
    ),
    Row(
        "target-full",
        lambda facts: "serious" if _targets(facts)[0][1] > _VERY_FULL else "warning",
        lambda facts: _full_targets(facts) > 0,
        _target_full_sentence,
        "move large files away from full targets",
    ),
    Row(
        "in-memory",
        "serious",
        _in_memory,
        lambda facts: (
            f"{_where(facts)} is a {facts.storage.type or 'tmpfs'}: files there are in memory, and "
            "are lost when the machine or the container stops"
        ),
        "use a directory on a disk or a shared filesystem; mount one into a container",
    ),
    Row(
        "container-layer",
        lambda facts: "serious" if _in_layer(facts) else "warning",
        lambda facts: facts.storage.family == "overlay" and not _in_memory(facts),
        lambda facts: (
            "this is the writable layer of a container: it is slow, and is lost with the container"
            if _in_layer(facts)
            else f"{_where(facts)} is an overlay: files are stored in its upper directory"
        ),
        "mount a shared filesystem or a disk into the container, and save there",
    ),
    Row(
        "not-shared",
        "warning",
        lambda facts: not facts.storage.remote and _is_spread(facts),
        "{ranks:,} ranks save together, {host.local_ranks:,} of them on this host, but the "
        "filesystem is local to this host: a checkpoint would be spread over all hosts",
        "use a directory on a shared filesystem",
    ),
    Row(
        "no-barrier",
        "serious",
        _no_barrier,
        "the mount has no write barriers: a power failure may lose a checkpoint that was reported "
        "as durable",
        "mount it with barriers",
    ),
    Row(
        "nfs-soft",
        "serious",
        _nfs(lambda options: "soft" in options or "softerr" in options),
        "the mount is soft: if the server is slow for a moment, writes fail, and programs that "
        "ignore errors lose data; a hard mount waits",
        "unmount it, and mount it with hard",
    ),
    Row(
        "nfs-nolock",
        "hint",
        _nfs(lambda options: "nolock" in options or options.get("local_lock") in ("all", "flock")),
        "file locks are local to this host (nolock or local_lock): leftovers of dead writers on "
        "other hosts are detected only after a day",
        "unmount it, and mount it with local_lock=none",
    ),
    Row(
        "tier-in-memory",
        "warning",
        _tier(lambda tier, _: tier.in_memory),
        "the tier {tier.folder} is in memory: a power failure loses checkpoints that are not "
        "drained, although their saves reported them as durable",
        "use a folder on a local disk",
    ),
    Row(
        "tier-waits",
        "warning",
        lambda facts: (
            facts.tier is not None and not facts.tier.draining and facts.tier.oldest_s >= _LONG_S
        ),
        _tier_waits_sentence,
        "run ioshape drain {tier.folder}",
    ),
    Row(
        "full",
        lambda facts: "serious" if _used_here(facts) > _VERY_FULL else "warning",
        lambda facts: _used_here(facts) > _FULL and not _no_space(facts),
        lambda facts: (
            f"the filesystem is {_used_here(facts):.0%} full "
            f"({human_size(facts.storage.free_bytes)} free); above {_FULL:.0%} writes become "
            "slower and less even"
        ),
        "remove old files",
    ),
    Row(
        "staging-memory",
        "warning",
        lambda facts: facts.host.memory_bytes is not None and _staged(facts) > _memory_left(facts),
        _staging_sentence,
        _stage_less,
    ),
    # Saves, or neighbours on the filesystem, are several times slower than necessary.
    Row(
        "sync-mount",
        "warning",
        lambda facts: "sync" in _options(facts),
        "the mount has the option sync: every write waits for the disk, but a save needs to wait "
        "only once, at its end",
        "mount it with async; unmount NFS before, because a remount cannot change this",
    ),
    Row(
        "tier-not-local",
        "warning",
        _tier(lambda tier, _: tier.remote or tier.is_destination),
        _tier_not_local_sentence,
        "use a folder on a local disk of each node",
    ),
    Row(
        "password-unreadable",
        lambda facts: "serious" if facts.coordination.unreachable == "fail" else "warning",
        _password_unreadable,
        "this user cannot read the coordinator's password in {installation.password_file} "
        "({installation.password_problem}), so the coordinator is unreachable",
        _LIMIT_PASSWORD,
    ),
    Row(
        "coordinator-away",
        lambda facts: "warning" if facts.coordination.unreachable == "stagger" else "serious",
        lambda facts: bool(facts.coordination.error),
        _away_sentence,
        "check that the Redis runs, and that this host can reach it",
    ),
    Row(
        "no-shared-coordinator",
        lambda facts: "warning" if _is_spread(facts) else "hint",
        lambda facts: facts.storage.remote and facts.coordination.kind in ("local", "open"),
        _unordered_sentence,
        "set IOSHAPE_COORDINATOR to the address of a Redis, such as redis://HOST",
    ),
    Row(
        "no-direct",
        lambda facts: "warning" if facts.storage.type.startswith("fuse") else "hint",
        lambda facts: facts.storage.direct is False,
        "direct I/O is not supported here: data passes through the page cache, which costs memory "
        "and CPU time",
        lambda facts: (
            "mount it with direct_io, which most FUSE filesystems support"
            if facts.storage.type.startswith("fuse")
            else "use another filesystem if saves are too slow"
        ),
    ),
    Row(
        "no-io-uring",
        "warning",
        lambda facts: facts.storage.uring_errno != 0,
        lambda facts: (
            f"io_uring is not available: {_no_uring(facts)[0]}; the threads engine writes instead, "
            "which takes more CPU time"
        ),
        lambda facts: _no_uring(facts)[1],
    ),
    Row(
        "no-shared-memory",
        "warning",
        _little_shared,
        _shared_sentence,
        "free space there, or mount it; start a container with --ipc=host",
    ),
    # Tidiness.
    Row(
        "password-readable",
        "hint",
        _password_readable,
        "all users can read the coordinator's password in {installation.password_file} (mode "
        "{installation.password_mode:04o}), so they can take slots and set capacities",
        _LIMIT_PASSWORD,
    ),
)
