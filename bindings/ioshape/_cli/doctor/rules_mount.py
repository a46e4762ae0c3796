# SPDX-License-Identifier: Apache-2.0
"""What an administrator would say of a mount and a directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ioshape._cli.doctor import remedies
from ioshape._cli.doctor.facts import Finding, Severity
from ioshape._cli.output import human_size, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._cli.doctor.facts import Facts, Leftovers

_MEMORY_TYPES = ("tmpfs", "ramfs", "devtmpfs")
_SMALL_WSIZE = 256 << 10
_GOOD_WSIZE = 1 << 20
_SKEW_S = 5.0


def options_of(facts: Facts) -> dict[str, str]:
    """The mount's options; "" for those without a value."""
    parts = (option.partition("=") for option in facts.storage.options.split(",") if option)
    return {name: value for name, _, value in parts}


def volatile(facts: Facts) -> Iterator[Finding]:
    """Where files do not outlive the process's surroundings."""
    storage = facts.storage
    if storage.type in _MEMORY_TYPES or storage.family == "tmpfs":
        yield Finding(
            "in-memory",
            "serious",
            f"{remedies.place(facts)} is a {storage.type or 'tmpfs'}: files there lie in memory, "
            "and are gone when the machine or the container stops",
            _volume(facts),
        )
    elif storage.family == "overlay":
        at_root = storage.mount_point in ("/", "")
        yield Finding(
            "container-layer",
            "serious" if at_root or facts.host.container else "warning",
            "this is the writable layer of a container: it is gone with the container, and slow"
            if at_root or facts.host.container
            else f"{remedies.place(facts)} is an overlay: where files really lie its upper "
            "directory says",
            _volume(facts)
            if at_root or facts.host.container
            else (f"findmnt -no OPTIONS {remedies.place(facts)}",),
        )


def _volume(facts: Facts) -> tuple[str, ...]:
    """A place that stays."""
    where = facts.folder.path
    if where.startswith("/dev/"):
        where = "/checkpoints"  # a volume over a place for devices helps nobody
    if facts.host.container:
        return remedies.container(
            facts,
            remedies.quoted("-v", f"/srv/checkpoints:{where}"),
            "kubectl explain pod.spec.volumes.persistentVolumeClaim",
        )
    return ("findmnt -o TARGET,SOURCE,FSTYPE,AVAIL -t notmpfs,nooverlay,noproc,nosysfs",)


def permissions(facts: Facts) -> Iterator[Finding]:
    """Whether a file can be made at all."""
    folder = facts.folder
    if folder.read_only:
        yield Finding(
            "read-only",
            "serious",
            f"{remedies.place(facts)} is mounted read-only; after errors of the disk the kernel "
            "does that by itself",
            ("dmesg | tail", *remedies.remount(facts, "rw")),
        )
    elif not folder.writable:
        user = facts.host.user
        yield Finding(
            "not-writable",
            "serious",
            f"{user or 'this user'} may not make files in {folder.path}",
            (
                f"ls -ld {remedies.folder(facts)}",
                f"sudo setfacl -m {remedies.quoted(f'u:{user}:rwx')} {remedies.folder(facts)}",
            ),
        )


def clock(facts: Facts) -> Iterator[Finding]:
    """Of the server, and of this host."""
    if facts.folder.ahead_s > _SKEW_S:
        yield Finding(
            "clock",
            "warning",
            f"the directory was changed {facts.folder.ahead_s:,.0f} s in the future: the clock of "
            "this host or of the server is wrong, and what is stale cannot be told by its age",
            ("chronyc tracking",),
        )


def leftovers(facts: Facts) -> Iterator[Finding]:
    """What dead writers left behind."""
    where, quoted = facts.folder.path, remedies.folder(facts)
    stale = facts.folder.temporary
    if stale.count or stale.elsewhere_count:
        n_bytes = human_size(stale.n_bytes + stale.elsewhere_bytes)
        unsure = (
            f"; {plural(stale.elsewhere_count, 'of them may be')} of a writer on another host or "
            "mount, which is certain to be dead after a day"
            if stale.elsewhere_count
            else ""
        )
        yield Finding(
            "stale-files",
            "hint",
            f"{plural(stale.count + stale.elsewhere_count, 'temporary file')} ({n_bytes}) of "
            f"writers that died {_lie(stale.count + stale.elsewhere_count)} in {where}{unsure}; "
            "the next save from this host removes its own",
            _removal(where, stale),
        )
    aside = facts.folder.leftovers
    if aside.count or aside.elsewhere_count:
        n_bytes = human_size(aside.n_bytes + aside.elsewhere_bytes)
        count = aside.count + aside.elsewhere_count
        yield Finding(
            "stale-generations",
            "hint",
            f"{plural(count, 'unfinished or replaced generation')} ({n_bytes}) that nobody here "
            f"works on {_lie(count)} in {where}; the next save_group() there removes them",
            (f"ioshape ls {quoted}", f"ioshape prune {quoted} --keep-last 1000000 --yes"),
        )


def _removal(where: str, stale: Leftovers) -> tuple[str, ...]:
    """Never what a living writer has: those by name, or what nobody has touched for a day."""
    commands = []
    if stale.names:
        commands.append(remedies.quoted("rm", "--", *(f"{where}/{name}" for name in stale.names)))
    if stale.elsewhere_count or stale.count > len(stale.names):
        commands.append(
            f"find {remedies.quoted(where)} -maxdepth 1 -type f -name '.*.ioshape-tmp-*' "
            "-mmin +1440 -delete"
        )
    return tuple(commands)


def _lie(count: int) -> str:
    return "lies" if count == 1 else "lie"


# ---- Options ------------------------------------------------------------------------------------


def generic(facts: Facts) -> Iterator[Finding]:
    """Options that any filesystem may have."""
    options = options_of(facts)
    if "sync" in options and facts.storage.family != "nfs":
        yield Finding(
            "sync-mount",
            "warning",
            "the mount has the option sync: every single write waits for the disk, while a save "
            "needs that once, at its end",
            remedies.remount(facts, "async"),
        )
    if "nobarrier" in options or options.get("barrier") == "0":
        yield Finding(
            "no-barrier",
            "serious",
            "the mount has no write barriers: what a save has made durable may be lost when the "
            "power fails",
            remedies.remount(facts, "barrier=1" if facts.storage.family == "ext" else "barrier"),
        )


class _Nfs(NamedTuple):
    """What a mount is often found with: the finding, and the options that mend it."""

    id: str
    severity: Severity
    found: Callable[[dict[str, str]], bool]
    sentence: str
    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()


_NFS = (
    _Nfs(
        "nfs-soft",
        "serious",
        lambda options: "soft" in options or "softerr" in options,
        "the mount is soft: when the server is slow for a moment, writes fail, and programs that "
        "do not look lose them; a hard mount waits",
        drop=("soft", "softerr"),
        add=("hard",),
    ),
    _Nfs(
        "nfs-sync",
        "warning",
        lambda options: "sync" in options,
        "the mount has the option sync: every write waits for the server's disk, while a save "
        "needs that once, at its end",
        drop=("sync",),
        add=("async",),
    ),
    _Nfs(
        "nfs-wsize",
        "warning",
        lambda options: (
            options.get("wsize", "").isdecimal() and int(options["wsize"]) < _SMALL_WSIZE
        ),
        f"a request carries less than {human_size(_SMALL_WSIZE)} (wsize), where "
        f"{human_size(_GOOD_WSIZE)} is usual; the server may have to allow it as well",
        drop=("wsize", "rsize"),
        add=(f"rsize={_GOOD_WSIZE}", f"wsize={_GOOD_WSIZE}"),
    ),
    _Nfs(
        "nfs-udp",
        "warning",
        lambda options: options.get("proto", "").startswith("udp"),
        "the mount goes over UDP: one lost packet repeats a whole request, and fast networks mix "
        "up fragments",
        drop=("proto",),
        add=("proto=tcp",),
    ),
    _Nfs(
        "nfs-nolock",
        "hint",
        lambda options: "nolock" in options or options.get("local_lock") in ("all", "flock"),
        "locks stay on this host (nolock or local_lock): what dead writers of other hosts left "
        "behind is known as such only after a day",
        drop=("nolock", "local_lock"),
        add=("local_lock=none",),
    ),
    _Nfs(
        "nfs-noac",
        "warning",
        lambda options: "noac" in options,
        "the mount has the option noac, which makes every write wait for the server, as sync does",
        drop=("noac",),
    ),
    _Nfs(
        "nfs-one-connection",
        "hint",
        lambda options: options.get("proto", "").startswith("tcp") and "nconnect" not in options,
        "all of this host's requests share one TCP connection; several carry more (Linux 5.3)",
        add=("nconnect=8",),
    ),
)


def nfs(facts: Facts) -> Iterator[Finding]:
    """What mounts of NFS are often found with."""
    if facts.storage.family == "nfs":
        for one in _NFS:
            if one.found(options_of(facts)):
                mended = remedies.mount_anew(facts, drop=one.drop, add=one.add)
                yield Finding(one.id, one.severity, one.sentence, (mended,))


RULES = (volatile, permissions, clock, leftovers, generic, nfs)
