# SPDX-License-Identifier: Apache-2.0
"""Findings of "ioshape doctor": a table (ROWS), sorted by impact, and functions that it uses.

Each row has a condition on the facts, a sentence, and commands to copy. Sentences and commands that
only insert names are templates; others are functions of the facts. Names in commands come from
mounts and files, so they are quoted for the shell.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from ioshape._cli.output import human_seconds, human_size, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ioshape._cli.doctor_facts import Facts, Near

#: "serious": a save would fail, be lost, or be wrong. "warning": saves are slow, or it may become
#: serious soon.
Severity = Literal["serious", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "hint")
Commands = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A finding with advice, as the user sees it."""

    #: stable name for programs
    id: str
    severity: Severity
    sentence: str
    #: shell commands to copy
    commands: Commands = ()


class Row(NamedTuple):
    """A row of the table: a possible finding with its condition."""

    id: str
    severity: Severity | Callable[[Facts], Severity]
    when: Callable[[Facts], bool]
    #: a template can use the members of Facts, "place" and "user"
    sentence: str | Callable[[Facts], str]
    #: templates can use the names of _filled()
    commands: Commands | Callable[[Facts], Commands] = ()


def triage(facts: Facts) -> list[Finding]:
    """Return all findings: the most severe first, and within a severity by impact."""
    found = [_finding(row, facts) for row in ROWS if row.when(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _finding(row: Row, facts: Facts) -> Finding:
    severity, sentence, commands = row.severity, row.sentence, row.commands
    names = {**vars(facts), "place": _place(facts), "user": facts.host.user or "this user"}
    return Finding(
        row.id,
        severity(facts) if callable(severity) else severity,
        sentence(facts) if callable(sentence) else sentence.format(**names),
        commands(facts) if callable(commands) else _filled(commands, facts),
    )


# ---- Commands -----------------------------------------------------------------------------------

_MIB = 1 << 20


_SHOW_SPACE = {
    "lustre": ("lfs df -h {place}",),
    "beegfs": ("beegfs health capacity", "beegfs-df   # BeeGFS 7"),
    "ceph": ("ceph osd df",),
}
_SHOW_SPACE_ELSEWHERE = ("du -xh --max-depth=1 {place} | sort -h | tail",)


#: commands that move large files away from a full target
_EMPTY_TARGET = {
    "lustre": (
        "lfs find {place} --ost {target} --type f --size +1G | lfs_migrate -y",
        "lctl set_param {no_more}   # on the metadata server: no new files",
    ),
    "beegfs": (
        "beegfs entry migrate --from-targets={target} {place}",
        "beegfs-ctl --migrate --targetid={target} {place}   # BeeGFS 7",
    ),
    "ceph": ("ceph osd reweight-by-utilization",),
}


#: NFS options that users set; mount rejects or ignores those that the kernel adds by itself
_OPTIONS_OF_USERS = (
    *("ro", "nosuid", "nodev", "noexec", "vers", "rsize", "wsize"),
    *("hard", "proto", "nconnect", "port", "sec"),
)


def _filled(templates: Commands, facts: Facts, **more: object) -> Commands:
    """Return commands from templates, with quoted names inserted."""
    names = {
        "place": _place(facts),
        "folder": shlex.quote(facts.folder.path),
        "user": shlex.quote(facts.host.user),
        "tier": shlex.quote(facts.tier.folder if facts.tier else ""),
        "password": shlex.quote(facts.installation.password_file),
        **more,
    }
    return tuple(template.format(**names) for template in templates)


def _of_family(
    commands: Mapping[str, Commands], facts: Facts, otherwise: Commands = (), **more: object
) -> Commands:
    return _filled(commands.get(facts.storage.family, otherwise), facts, **more)


def _place(facts: Facts) -> str:
    """Return the quoted mount point; if it is unknown, the directory."""
    return shlex.quote(facts.storage.mount_point or facts.folder.path)


def _show_space(facts: Facts) -> Commands:
    return _of_family(_SHOW_SPACE, facts, _SHOW_SPACE_ELSEWHERE)


def _empty_target(facts: Facts) -> Commands:
    name, _ = _targets(facts)[0]
    no_more = shlex.quote(f"osp.{name}-osc-MDT*.max_create_count=0")
    return _of_family(_EMPTY_TARGET, facts, target=shlex.quote(name), no_more=no_more)


def _container(facts: Facts, option: str, kubernetes: str = "") -> Commands:
    """Return a command that starts the container with an option.

    Args:
        facts: the facts.
        option: option of Docker and Podman.
        kubernetes: command for Kubernetes; "" for none.
    """
    if facts.host.container == "kubernetes":
        return (kubernetes,) if kubernetes else ()
    program = facts.host.container if facts.host.container == "podman" else "docker"
    return (f"{program} run {option} IMAGE",)


def _volume(facts: Facts) -> Commands:
    """Return a command that mounts, or lists, persistent storage."""
    where = facts.folder.path
    if where.startswith("/dev/"):
        where = "/checkpoints"  # a volume must not be mounted over a folder of devices
    if facts.host.container:
        return _container(
            facts,
            shlex.join(("-v", f"/srv/checkpoints:{where}")),
            "kubectl explain pod.spec.volumes.persistentVolumeClaim",
        )
    return ("findmnt -o TARGET,SOURCE,FSTYPE,AVAIL -t notmpfs,nooverlay,noproc,nosysfs",)


def _lock_memory(facts: Facts) -> Commands:
    kib = -(-_registered(facts) * max(facts.host.local_ranks, 1) * 2 // 1024)
    if facts.host.container and facts.host.container != "kubernetes":
        return _container(facts, "--ulimit memlock=-1:-1")
    line = shlex.quote(f"{facts.host.user or '*'} - memlock unlimited")
    return (
        f"ulimit -l {kib}",
        f"echo {line} | sudo tee /etc/security/limits.d/memlock.conf",
    )


def _ping(facts: Facts) -> Commands:
    """Return a command that pings the Redis, without the password: it is masked in the address."""
    parts = urlsplit(facts.coordination.address)
    if parts.scheme == "unix":
        return (shlex.join(("redis-cli", "-s", parts.path, "ping")),)
    if parts.scheme not in ("redis", "rediss"):
        return ("ioshape slots status",)
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port or 6379
    except ValueError:  # the address lists several hosts of a cluster
        host, port = parts.netloc.rpartition("@")[2].partition(",")[0].partition(":")[0], 6379
    tls = ("--tls",) if parts.scheme == "rediss" else ()
    return (shlex.join(("redis-cli", "-h", host, "-p", str(port), *tls, "ping")),)


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


def _no_room(facts: Facts) -> bool:
    return bool(facts.storage.total_bytes) and facts.storage.free_bytes < _needed(facts)


def _no_room_sentence(facts: Facts) -> str:
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


def _nfs(
    id: str,  # noqa: A002 - as in a row
    severity: Severity,
    found: Callable[[dict[str, str]], bool],
    sentence: str,
    *,
    drop: Commands = (),
    add: Commands = (),
) -> Row:
    """Return a row about mount options of NFS.

    `found` is the condition on the mount options. The command of the row mounts without the options
    `drop` and with the options `add`. It unmounts first, because a remount cannot change most
    options.
    """

    def commands(facts: Facts) -> Commands:
        kept = [
            option
            for option in facts.storage.options.split(",")
            if option.partition("=")[0] in _OPTIONS_OF_USERS
            and option.partition("=")[0] not in drop
        ]
        options = ",".join(dict.fromkeys([*kept, *add]))
        kind = facts.storage.type or "nfs"
        mount = shlex.join(("-t", kind, "-o", options, facts.storage.source))
        return (f"sudo umount {_place(facts)} && sudo mount {mount} {_place(facts)}",)

    def when(facts: Facts) -> bool:
        return facts.storage.family == "nfs" and found(_options(facts))

    return Row(id, severity, when, sentence, commands)


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


def _registered(facts: Facts) -> int:
    """Return the bytes of the buffers of a save, which io_uring registers."""
    return facts.storage.block_bytes * facts.storage.queue_depth


def _no_uring(facts: Facts) -> tuple[str, Commands]:
    """Return the reason why io_uring is refused, and commands that allow it."""
    code, host = facts.storage.uring_errno, facts.host
    if code in (errno.EPERM, errno.EACCES) and host.uring_disabled:
        who = (
            "to all processes"
            if host.uring_disabled > 1
            else "to processes outside kernel.io_uring_group"
        )
        return (
            f"the sysctl kernel.io_uring_disabled={host.uring_disabled} denies it {who}",
            ("sudo sysctl kernel.io_uring_disabled=0",),
        )
    if host.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return (
            "the seccomp profile of this process denies it",
            (
                'jq \'.syscalls += [{names: ["io_uring_setup", "io_uring_enter", '
                '"io_uring_register"], action: "SCMP_ACT_ALLOW"}]\' default.json > io_uring.json'
                "   # the runtime's own profile",
                *_container(
                    facts,
                    "--security-opt seccomp=io_uring.json",
                    "kubectl explain pod.spec.securityContext.seccompProfile.localhostProfile",
                ),
            ),
        )
    if code == errno.ENOSYS:
        kernel = host.kernel or "of an unknown version"
        return f"the kernel ({kernel}) does not support it", ("uname -r",)
    if code == errno.ENOMEM:
        why = "the limit of locked memory (RLIMIT_MEMLOCK) is too low"
        return why, _lock_memory(facts)
    return os.strerror(code), ()


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


def _stage_less(facts: Facts) -> Commands:
    share = _memory_left(facts) // 2 // max(facts.host.local_ranks, 1)
    return (f"export IOSHAPE_STAGING_BYTES={max(64, share // _MIB)}M",)


def _little_shared(facts: Facts) -> bool:
    free = facts.host.shared_bytes
    return free is None or free < _LITTLE_SHARED


def _shared_sentence(facts: Facts) -> str:
    free = facts.host.shared_bytes
    why = "/dev/shm is missing or not writable for this user"
    if free is not None:
        why = f"/dev/shm has {human_size(free)} left"
    return f"{why}: ranks of this host exchange messages and slots through files elsewhere"


def _share_memory(facts: Facts) -> Commands:
    if facts.host.shared_bytes is not None:
        return ("du -sh /dev/shm/* | sort -h | tail",)
    if facts.host.container:
        return _container(facts, "--ipc=host")
    return ("sudo mount -t tmpfs tmpfs /dev/shm",)


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


#: The order matters: between the two commands, every user who could read the file still can.
_LIMIT_PASSWORD = ("chgrp GROUP {password}", "chmod 440 {password}")


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
        "{place} is mounted read-only; the kernel does this after disk errors",
        ("dmesg | tail", "sudo mount -o remount,rw {place}"),
    ),
    Row(
        "not-writable",
        "serious",
        lambda facts: not facts.folder.writable and not facts.folder.read_only,
        "{user} cannot create files in {folder.path}",
        ("ls -ld {folder}", "sudo setfacl -m u:{user}:rwx {folder}"),
    ),
    Row(
        "no-room",
        "serious",
        _no_room,
        _no_room_sentence,
        lambda facts: (
            *_show_space(facts),
            # The alternative, if no space can be freed now.
            "export IOSHAPE_FULL=skip   # skips that checkpoint",
        ),
    ),
    Row(
        "few-inodes",
        lambda facts: "serious" if facts.folder.inodes_free < _FEW_INODES else "warning",
        _few_inodes,
        "{folder.inodes_free:,} of {folder.inodes:,} inodes are free; without a free inode no file "
        "can be created, even if there is free space",
        ("df -i {place}", "du --inodes -x --max-depth=2 {place} | sort -n | tail"),
    ),
    Row(
        "file-size-limit",
        "serious",
        lambda facts: (
            facts.host.file_bytes is not None and facts.host.file_bytes < facts.storage.for_bytes
        ),
        _file_limit_sentence,
        ("ulimit -f unlimited",),
    ),
    Row(
        "target-full",
        lambda facts: "serious" if _targets(facts)[0][1] > _VERY_FULL else "warning",
        lambda facts: _full_targets(facts) > 0,
        _target_full_sentence,
        lambda facts: (*_show_space(facts), *_empty_target(facts)),
    ),
    Row(
        "in-memory",
        "serious",
        _in_memory,
        lambda facts: (
            f"{_place(facts)} is a {facts.storage.type or 'tmpfs'}: files there are in memory, and "
            "are lost when the machine or the container stops"
        ),
        _volume,
    ),
    Row(
        "container-layer",
        lambda facts: "serious" if _in_layer(facts) else "warning",
        lambda facts: facts.storage.family == "overlay" and not _in_memory(facts),
        lambda facts: (
            "this is the writable layer of a container: it is slow, and is lost with the container"
            if _in_layer(facts)
            else f"{_place(facts)} is an overlay: files are stored in its upper directory"
        ),
        lambda facts: (
            _volume(facts) if _in_layer(facts) else _filled(("findmnt -no OPTIONS {place}",), facts)
        ),
    ),
    Row(
        "not-shared",
        "warning",
        lambda facts: not facts.storage.remote and _is_spread(facts),
        "{ranks:,} ranks save together, {host.local_ranks:,} of them on this host, but the "
        "filesystem is local to this host: a checkpoint would be spread over all hosts",
        ("findmnt -t lustre,nfs,nfs4,beegfs,ceph,gpfs,wekafs,fuse",),
    ),
    Row(
        "no-barrier",
        "serious",
        _no_barrier,
        "the mount has no write barriers: a power failure may lose a checkpoint that was reported "
        "as durable",
        lambda facts: _of_family(
            {"ext": ("sudo mount -o remount,barrier=1 {place}",)},
            facts,
            ("sudo mount -o remount,barrier {place}",),
        ),
    ),
    _nfs(
        "nfs-soft",
        "serious",
        lambda options: "soft" in options or "softerr" in options,
        "the mount is soft: if the server is slow for a moment, writes fail, and programs that "
        "ignore errors lose data; a hard mount waits",
        drop=("soft", "softerr"),
        add=("hard",),
    ),
    _nfs(
        "nfs-nolock",
        "hint",
        lambda options: "nolock" in options or options.get("local_lock") in ("all", "flock"),
        "file locks are local to this host (nolock or local_lock): leftovers of dead writers on "
        "other hosts are detected only after a day",
        drop=("nolock", "local_lock"),
        add=("local_lock=none",),
    ),
    Row(
        "tier-in-memory",
        "warning",
        _tier(lambda tier, _: tier.in_memory),
        "the tier {tier.folder} is in memory: a power failure loses checkpoints that are not "
        "drained, although their saves reported them as durable",
        ("findmnt -T {tier}",),
    ),
    Row(
        "tier-waits",
        "warning",
        lambda facts: (
            facts.tier is not None and not facts.tier.draining and facts.tier.oldest_s >= _LONG_S
        ),
        _tier_waits_sentence,
        ("ioshape drain {tier}",),
    ),
    Row(
        "full",
        lambda facts: "serious" if _used_here(facts) > _VERY_FULL else "warning",
        lambda facts: _used_here(facts) > _FULL and not _no_room(facts),
        lambda facts: (
            f"the filesystem is {_used_here(facts):.0%} full "
            f"({human_size(facts.storage.free_bytes)} free); above {_FULL:.0%} writes become "
            "slower and less even"
        ),
        _show_space,
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
        ("sudo mount -o remount,async {place}",),
    ),
    Row(
        "tier-not-local",
        "warning",
        _tier(lambda tier, _: tier.remote or tier.is_destination),
        _tier_not_local_sentence,
        ("findmnt -T {tier}",),
    ),
    Row(
        "password-unreadable",
        lambda facts: "serious" if facts.coordination.unreachable == "fail" else "warning",
        _password_unreadable,
        "this user cannot read the coordinator's password in {installation.password_file} "
        "({installation.password_problem}), so the coordinator is unreachable; change the file's "
        "group to one with all users of the coordinator",
        _LIMIT_PASSWORD,
    ),
    Row(
        "coordinator-away",
        lambda facts: "warning" if facts.coordination.unreachable == "stagger" else "serious",
        lambda facts: bool(facts.coordination.error),
        _away_sentence,
        _ping,
    ),
    Row(
        "no-shared-coordinator",
        lambda facts: "warning" if _is_spread(facts) else "hint",
        lambda facts: facts.storage.remote and facts.coordination.kind in ("local", "open"),
        _unordered_sentence,
        ("export IOSHAPE_COORDINATOR=redis://HOST",),
    ),
    Row(
        "no-direct",
        lambda facts: "warning" if facts.storage.type.startswith("fuse") else "hint",
        lambda facts: facts.storage.direct is False,
        lambda facts: (
            "direct I/O is not supported here: data passes through the page cache, which costs "
            "memory and CPU time"
            + (
                "; most FUSE filesystems support it if they are mounted with direct_io"
                if facts.storage.type.startswith("fuse")
                else ""
            )
        ),
        lambda facts: (
            _filled(("findmnt -no OPTIONS {place}",), facts)
            if facts.storage.type.startswith("fuse")
            else ()
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
    Row("no-shared-memory", "warning", _little_shared, _shared_sentence, _share_memory),
    # Tidiness.
    Row(
        "password-readable",
        "hint",
        _password_readable,
        "all users can read the coordinator's password in {installation.password_file} (mode "
        "{installation.password_mode:04o}), so they can take slots and set capacities; change the "
        "file's group to one with all users of the coordinator",
        _LIMIT_PASSWORD,
    ),
)
