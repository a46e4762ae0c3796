# SPDX-License-Identifier: Apache-2.0
"""Commands to copy. Names in them come from mounts and files: they are quoted for a shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ioshape._cli.doctor.facts import Facts

_MIB = 1 << 20
_GIB = 1 << 30

#: Up to so many bytes, over so many targets: what FSx for Lustre does by itself.
_STEPS = ((100 * _MIB, 1), (10 * _GIB, 8), (100 * _GIB, 16), (None, 32))

_STRIPE_BYTES = 4 * _MIB

#: Where it cannot be helped now.
SKIP_WHAT_DOES_NOT_FIT = ("export IOSHAPE_FULL=skip   # goes on without that checkpoint",)


def quoted(*words: str) -> str:
    """A command, or a part of one."""
    return shlex.join(words)


def place(facts: Facts) -> str:
    """The mount point, or what is nearest to it: quoted."""
    return quoted(facts.storage.mount_point or facts.folder.path)


def folder(facts: Facts) -> str:
    """The directory: quoted."""
    return quoted(facts.folder.path)


def wanted_stripes(n_bytes: int, targets: int, files: int) -> int:
    """How many targets a file should lie on, if so many are written at a time."""
    by_size = next(count for most, count in _STEPS if most is None or n_bytes <= most)
    return max(1, min(by_size, targets // max(files, 1) or 1, targets or by_size))


def set_stripes(facts: Facts, count: int, stripe_bytes: int = _STRIPE_BYTES) -> tuple[str, ...]:
    """New files of the directory shall lie so."""
    where, mib = folder(facts), stripe_bytes // _MIB
    layout = f"stripe_unit={stripe_bytes} stripe_count={count} object_size={stripe_bytes}"
    return {
        "lustre": (f"lfs setstripe -c {count} -S {mib}M {where}",),
        "beegfs": (
            f"beegfs entry set --num-targets={count} --chunk-size={mib}MiB {where}",
            f"beegfs-ctl --setpattern --numtargets={count} --chunksize={mib}m {where}   # BeeGFS 7",
        ),
        "ceph": (f"setfattr -n ceph.dir.layout -v '{layout}' {where}",),
    }.get(facts.storage.family, ())


def set_progressive(facts: Facts) -> tuple[str, ...]:
    """Small files on one target, large ones on many; on Lustre, which alone has that."""
    targets = facts.storage.target_count
    words = ""
    for most, count in _STEPS:
        if most is None or (targets and count >= targets):
            words += f" -E -1 -c {min(count, targets or count)}"
            break
        end = f"{most // _MIB}M" if most < _GIB else f"{most // _GIB}G"
        words += f" -E {end} -c {count}"
    return (f"lfs setstripe{words} {folder(facts)}",)


def set_pool(facts: Facts, pool: str) -> tuple[str, ...]:
    """New files of the directory shall lie on these targets."""
    if facts.storage.family == "lustre":
        return (f"lfs setstripe -p {quoted(pool)} {folder(facts)}",)
    return ()


def show_space(facts: Facts) -> tuple[str, ...]:
    """Where the bytes are."""
    return {
        "lustre": (f"lfs df -h {place(facts)}",),
        "beegfs": ("beegfs health capacity", "beegfs-df   # BeeGFS 7"),
        "ceph": ("ceph osd df",),
    }.get(facts.storage.family, (f"du -xh --max-depth=1 {place(facts)} | sort -h | tail",))


def show_quota(facts: Facts) -> tuple[str, ...]:
    """Limits of a user, which statfs does not know."""
    user = quoted(facts.host.user)
    return {
        "lustre": (f"lfs quota -h -u {user} {place(facts)}",),
        "beegfs": (
            "beegfs quota list-usage --uids current",
            f"beegfs-ctl --getquota --uid {user}   # BeeGFS 7",
        ),
        "gpfs": (f"mmlsquota -u {user}",),
        "ceph": (f"getfattr -n ceph.quota.max_bytes {folder(facts)}",),
        "nfs": (f"quota -s -u {user}",),
    }.get(facts.storage.family, ())


def empty_target(facts: Facts, target: str) -> tuple[str, ...]:
    """Large files shall leave a full target."""
    name, where = quoted(target), place(facts)
    no_more = quoted(f"osp.{target}-osc-MDT*.max_create_count=0")
    return {
        "lustre": (
            f"lfs find {where} --ost {name} --type f --size +1G | lfs_migrate -y",
            f"lctl set_param {no_more}   # on the metadata server: no new files",
        ),
        "beegfs": (
            f"beegfs entry migrate --from-targets={name} {where}",
            f"beegfs-ctl --migrate --targetid={name} {where}   # BeeGFS 7",
        ),
        "ceph": ("ceph osd reweight-by-utilization",),
    }.get(facts.storage.family, ())


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
    source = quoted("-t", kind, "-o", options, facts.storage.source)
    return f"sudo umount {place(facts)} && sudo mount {source} {place(facts)}"


_OPTIONS_OF_USERS = (
    *("ro", "nosuid", "nodev", "noexec", "vers", "rsize", "wsize"),
    *("hard", "proto", "nconnect", "port", "sec"),
)


def remount(facts: Facts, option: str) -> tuple[str, ...]:
    """The same mount with another option."""
    return (f"sudo mount -o remount,{option} {place(facts)}",)


def container(facts: Facts, option: str, kubernetes: str = "") -> tuple[str, ...]:
    """An option of whoever starts the container."""
    if facts.host.container == "kubernetes":
        return (kubernetes,) if kubernetes else ()
    program = facts.host.container if facts.host.container == "podman" else "docker"
    return (f"{program} run {option} IMAGE",)
