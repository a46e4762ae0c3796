# SPDX-License-Identifier: Apache-2.0
"""Commands to copy. Names in them come from mounts and files: they are quoted for a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ioshape.cli.probe.facts import Facts

_MIB = 1 << 20
_GIB = 1 << 30

#: Up to so many bytes, over so many targets: what FSx for Lustre does by itself.
_STEPS = ((100 * _MIB, 1), (10 * _GIB, 8), (100 * _GIB, 16), (None, 32))

_STRIPE_BYTES = 4 * _MIB

#: Where it cannot be helped now.
SKIP_WHAT_DOES_NOT_FIT = ("export IOSHAPE_FULL=skip   # goes on without that checkpoint",)


def quoted(*words: str) -> str:
    """A command."""
    return shlex.join(words)


def place(facts: Facts) -> str:
    """The mount point, or what is nearest to it."""
    return facts.storage.mount_point or facts.folder.path


def wanted_stripes(n_bytes: int, targets: int, files: int) -> int:
    """How many targets a file should lie on, if so many are written at a time."""
    by_size = next(count for most, count in _STEPS if most is None or n_bytes <= most)
    return max(1, min(by_size, targets // max(files, 1) or 1, targets or by_size))


def set_stripes(facts: Facts, count: int, stripe_bytes: int = _STRIPE_BYTES) -> tuple[str, ...]:
    """New files of the directory shall lie so."""
    folder = facts.folder.path
    family = facts.storage.family
    if family == "lustre":
        size = f"{stripe_bytes // _MIB}M"
        return (quoted("lfs", "setstripe", "-c", str(count), "-S", size, folder),)
    if family == "beegfs":
        size = f"{stripe_bytes // _MIB}"
        chosen = ("beegfs", "entry", "set", f"--num-targets={count}", f"--chunk-size={size}MiB")
        older = (f"--numtargets={count}", f"--chunksize={size}m")
        return (
            quoted(*chosen, folder),
            quoted("beegfs-ctl", "--setpattern", *older, folder) + "   # BeeGFS 7",
        )
    if family == "ceph":
        layout = f"stripe_unit={stripe_bytes} stripe_count={count} object_size={stripe_bytes}"
        return (quoted("setfattr", "-n", "ceph.dir.layout", "-v", layout, folder),)
    return ()


def set_progressive(facts: Facts) -> tuple[str, ...]:
    """Small files on one target, large ones on many; on Lustre, which alone has that."""
    targets = facts.storage.target_count
    words = ["lfs", "setstripe"]
    for most, count in _STEPS:
        last = most is None or (targets and count >= targets)
        end = (
            "-1"
            if last or most is None
            else f"{most // _MIB}M"
            if most < _GIB
            else (f"{most // _GIB}G")
        )
        words += ["-E", end, "-c", str(min(count, targets or count))]
        if last:
            break
    return (quoted(*words, facts.folder.path),)


def set_pool(facts: Facts, pool: str) -> tuple[str, ...]:
    """New files of the directory shall lie on these targets."""
    if facts.storage.family == "lustre":
        return (quoted("lfs", "setstripe", "-p", pool, facts.folder.path),)
    return ()


def show_space(facts: Facts) -> tuple[str, ...]:
    """Where the bytes are."""
    family = facts.storage.family
    if family == "lustre":
        return (quoted("lfs", "df", "-h", place(facts)),)
    if family == "beegfs":
        return ("beegfs health capacity", "beegfs-df   # BeeGFS 7")
    if family == "ceph":
        return ("ceph osd df",)
    return (quoted("du", "-xh", "--max-depth=1", place(facts)) + " | sort -h | tail",)


def show_quota(facts: Facts) -> tuple[str, ...]:
    """Limits of a user, which statfs does not know."""
    user, folder, mount = facts.host.user, facts.folder.path, place(facts)
    return {
        "lustre": (quoted("lfs", "quota", "-h", "-u", user, mount),),
        "beegfs": (
            "beegfs quota list-usage --uids current",
            quoted("beegfs-ctl", "--getquota", "--uid", user) + "   # BeeGFS 7",
        ),
        "gpfs": (quoted("mmlsquota", "-u", user),),
        "ceph": (quoted("getfattr", "-n", "ceph.quota.max_bytes", folder),),
        "nfs": (quoted("quota", "-s", "-u", user),),
    }.get(facts.storage.family, ())


def empty_target(facts: Facts, target: str) -> tuple[str, ...]:
    """Large files shall leave a full target."""
    family = facts.storage.family
    if family == "lustre":
        find = ("lfs", "find", place(facts), "--ost", target, "--type", "f", "--size", "+1G")
        no_more = f"osp.{target}-osc-MDT*.max_create_count=0"
        return (
            quoted(*find) + " | lfs_migrate -y",
            quoted("lctl", "set_param", no_more) + "   # on the metadata server: no new files",
        )
    if family == "beegfs":
        return (
            quoted("beegfs", "entry", "migrate", f"--from-targets={target}", place(facts)),
            quoted("beegfs-ctl", "--migrate", f"--targetid={target}", place(facts))
            + "   # BeeGFS 7",
        )
    if family == "ceph":
        return ("ceph osd reweight-by-utilization",)
    return ()


def mount_anew(facts: Facts, *, drop: tuple[str, ...] = (), add: tuple[str, ...] = ()) -> str:
    """Unmounted and mounted with other options: most of NFS's cannot be changed otherwise."""
    # What the kernel adds to the list by itself would be refused, or mean nothing.
    kept = [
        option
        for option in facts.storage.options.split(",")
        if option.partition("=")[0] in _OPTIONS_OF_USERS and option.partition("=")[0] not in drop
    ]
    options = ",".join([*dict.fromkeys([*kept, *add])])
    kind = facts.storage.type or "nfs"
    mount = quoted("mount", "-t", kind, "-o", options, facts.storage.source, place(facts))
    return f"sudo umount {quoted(place(facts))} && sudo {mount}"


_OPTIONS_OF_USERS = frozenset(
    (
        "ro",
        "nosuid",
        "nodev",
        "noexec",
        "vers",
        "rsize",
        "wsize",
        "hard",
        "proto",
        "nconnect",
        "port",
        "sec",
    )
)


def remount(facts: Facts, option: str) -> tuple[str, ...]:
    """The same mount with another option."""
    return ("sudo " + quoted("mount", "-o", f"remount,{option}", place(facts)),)


def container(facts: Facts, option: str, kubernetes: str = "") -> tuple[str, ...]:
    """An option of whoever starts the container."""
    if facts.host.container == "kubernetes":
        return (kubernetes,) if kubernetes else ()
    program = facts.host.container if facts.host.container == "podman" else "docker"
    return (f"{program} run {option} IMAGE",)
