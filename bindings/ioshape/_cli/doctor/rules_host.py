# SPDX-License-Identifier: Apache-2.0
"""What an administrator would say of a process's limits, and of its coordinator."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ioshape._cli.doctor import remedies
from ioshape._cli.doctor.facts import Finding
from ioshape._cli.output import human_size, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._cli.doctor.facts import Facts

_FEW_FILES = 256
_SLOW_S = 0.020
_MIB = 1 << 20


# ---- Limits -------------------------------------------------------------------------------------


def uring(facts: Facts) -> Iterator[Finding]:
    """Whether it may be used, and who says so if not."""
    code = facts.storage.uring_errno
    host = facts.host
    if not code:
        return
    instead = "; the threads engine writes instead, which costs more of a core"
    if code in (errno.EPERM, errno.EACCES) and host.uring_disabled:
        who = "to all" if host.uring_disabled > 1 else "to those outside kernel.io_uring_group"
        why = f"the setting kernel.io_uring_disabled={host.uring_disabled} refuses it {who}"
        commands: tuple[str, ...] = ("sudo sysctl kernel.io_uring_disabled=0",)
    elif host.seccomp and code in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        why = "the seccomp profile that this process runs under refuses it"
        commands = (
            'jq \'.syscalls += [{names: ["io_uring_setup", "io_uring_enter", '
            '"io_uring_register"], action: "SCMP_ACT_ALLOW"}]\' default.json > io_uring.json'
            "   # the runtime's own profile",
            *remedies.container(
                facts,
                "--security-opt seccomp=io_uring.json",
                "kubectl explain pod.spec.securityContext.seccompProfile.localhostProfile",
            ),
        )
    elif code == errno.ENOSYS:
        why = f"the kernel ({host.kernel or 'its version is not known'}) has none"
        commands = ("uname -r",)
    elif code == errno.ENOMEM:
        why = "there is not enough memory that may be locked (RLIMIT_MEMLOCK)"
        commands = _memlock_commands(facts)
    else:
        why = os.strerror(code)
        commands = ()
    yield Finding("no-io-uring", "warning", f"io_uring is refused: {why}{instead}", commands)


def _registered(facts: Facts) -> int:
    return facts.storage.block_bytes * facts.storage.queue_depth


def _memlock_commands(facts: Facts) -> tuple[str, ...]:
    kib = -(-_registered(facts) * max(facts.host.local_ranks, 1) * 2 // 1024)
    if facts.host.container and facts.host.container != "kubernetes":
        return remedies.container(facts, "--ulimit memlock=-1:-1")
    user = facts.host.user or "*"
    line = remedies.quoted(f"{user} - memlock unlimited")
    return (
        f"ulimit -l {kib}",
        f"echo {line} | sudo tee /etc/security/limits.d/memlock.conf",
    )


def memlock(facts: Facts) -> Iterator[Finding]:
    """For buffers that are registered with io_uring."""
    limit = facts.host.memlock_bytes
    if facts.storage.uring_errno or not facts.storage.buffers_refused:
        return
    allowed = "is not enough" if limit is None else f"is {human_size(limit)}"
    yield Finding(
        "memlock",
        "hint",
        f"memory that may be locked (RLIMIT_MEMLOCK) {allowed}, and buffers of a save take "
        f"{human_size(_registered(facts))}: they are not registered, and the kernel looks them up "
        "for each request",
        _memlock_commands(facts),
    )


def limits(facts: Facts) -> Iterator[Finding]:
    """Of files."""
    host = facts.host
    need = facts.storage.for_bytes
    if host.file_bytes is not None and host.file_bytes < need:
        yield Finding(
            "file-size-limit",
            "serious",
            f"this process may not make files larger than {human_size(host.file_bytes)} "
            f"(RLIMIT_FSIZE), and a save of {human_size(need)} would fail",
            ("ulimit -f unlimited",),
        )
    if host.open_files is not None and host.open_files < _FEW_FILES:
        yield Finding(
            "few-open-files",
            "warning",
            f"this process may open {host.open_files} files at a time (RLIMIT_NOFILE), sockets "
            "included, of which a job of many ranks needs hundreds",
            ("ulimit -n 65536",),
        )


def memory(facts: Facts) -> Iterator[Finding]:
    """Of a container, against what background saves hold."""
    host = facts.host
    if host.memory_bytes is not None:
        held = min(host.staging_bytes, facts.storage.for_bytes) * max(host.local_ranks, 1)
        free = max(0, host.memory_bytes - host.memory_used)
        if held > free:
            each = max(64 * _MIB, free // 2 // max(host.local_ranks, 1) // _MIB * _MIB)
            yield Finding(
                "staging-memory",
                "warning",
                f"background saves of {plural(max(host.local_ranks, 1), 'rank')} here may hold "
                f"{human_size(held)}, and {human_size(free)} are left of the "
                f"{human_size(host.memory_bytes)} of the container: the kernel kills who takes "
                "more",
                (f"export IOSHAPE_STAGING_BYTES={each // _MIB}M",),
            )


# ---- The coordinator ----------------------------------------------------------------------------


def coordinator(facts: Facts) -> Iterator[Finding]:
    """Whether it can be reached, and whether it is the right one."""
    it = facts.coordination
    if it.error:
        then = {
            "fail": "saves fail meanwhile (unreachable=fail)",
            "wait": "saves wait until it is back (unreachable=wait)",
        }.get(
            it.unreachable,
            "saves go on meanwhile, each in a share of time of its own (unreachable=stagger)",
        )
        yield Finding(
            "coordinator-away",
            "warning" if it.unreachable == "stagger" else "serious",
            f"the coordinator {it.address} cannot be asked: {it.error}; {then}",
            _ask(it.address),
        )
    elif it.unasked:
        yield Finding(
            "no-redis-package",
            "hint",
            f"the coordinator {it.address} cannot be asked: the package redis, which "
            "ioshape doctor, top and slots need, is not installed; saves do not need it",
            ("pip install 'ioshape[redis]'",),
        )
    elif it.kind == "redis" and it.latency_s > _SLOW_S:
        yield Finding(
            "coordinator-slow",
            "hint",
            f"the coordinator took {it.latency_s * 1000:,.0f} ms to answer, where one in the same "
            "building takes less than 1",
            _ask(it.address),
        )
    if facts.storage.remote and it.kind in ("local", "open"):
        who = (
            "nobody keeps an order of writers (coordinator=open)"
            if it.kind == "open"
            else "only the processes of this host share slots"
        )
        yield Finding(
            "no-shared-coordinator",
            "warning" if facts.ranks > max(facts.host.local_ranks, 1) else "hint",
            f"other hosts write to this filesystem as well, and {who}",
            ("export IOSHAPE_COORDINATOR=redis://HOST",),
        )
    if not facts.storage.remote and facts.ranks > max(facts.host.local_ranks, 1):
        yield Finding(
            "not-shared",
            "warning",
            f"{facts.ranks:,} ranks save together, {facts.host.local_ranks:,} of them on this "
            "host, and the filesystem is this host's own: a checkpoint would be in pieces on all "
            "of them",
            ("findmnt -t lustre,nfs,nfs4,beegfs,ceph,gpfs,wekafs,fuse",),
        )


def _ask(address: str) -> tuple[str, ...]:
    """Redis's own client would ask so. Without any password, which has been starred out."""
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return (remedies.quoted("redis-cli", "-s", parts.path, "ping"),)
    if parts.scheme not in ("redis", "rediss"):
        return ("ioshape slots status",)
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port or 6379
    except ValueError:  # several hosts of a cluster
        host, port = parts.netloc.rpartition("@")[2].partition(",")[0].partition(":")[0], 6379
    tls = ("--tls",) if parts.scheme == "rediss" else ()
    return (remedies.quoted("redis-cli", "-h", host, "-p", str(port), *tls, "ping"),)


RULES = (uring, memlock, limits, memory, coordinator)
