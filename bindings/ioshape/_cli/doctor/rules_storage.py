# SPDX-License-Identifier: Apache-2.0
"""What an administrator would say of a filesystem: each rule takes facts, and yields findings."""

from __future__ import annotations

import re
from statistics import median
from typing import TYPE_CHECKING

from ioshape._cli.doctor import remedies
from ioshape._cli.doctor.facts import Finding
from ioshape._cli.output import human_size, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._cli.doctor.facts import Facts
    from ioshape._probe import StorageTarget

_MIB = 1 << 20
_GIB = 1 << 30

#: Filesystems allocate slowly and unevenly beyond this.
FULL = 0.85
VERY_FULL = 0.95
#: So much above the others a target is one that was filled by itself.
UNEVEN = 0.20

_FEW_INODES = 1000
_MANY_STRIPES = 64
_MANY_OBJECTS = 4096
#: Disks of virtual machines say that they spin, whatever they are.
VIRTUAL_DISKS = ("/dev/vd", "/dev/xvd")
_FLASH = ("flash", "ssd", "nvme", "fast", "burst", "hot", "optane")
_DISKS = ("hdd", "disk", "capacity", "archive", "cold", "slow", "sata", "nearline")

#: Families that have files on several targets, and are asked for layouts.
STRIPED = ("lustre", "beegfs", "ceph")


def used_part(total: int, free: int) -> float:
    """0 to 1; 0 if it is not known."""
    return 1 - min(free, total) / total if total else 0.0


# ---- Space --------------------------------------------------------------------------------------


def space(facts: Facts) -> Iterator[Finding]:
    """Of the filesystem as a whole."""
    storage = facts.storage
    used = used_part(storage.total_bytes, storage.free_bytes)
    free = human_size(storage.free_bytes)
    files = facts.files_here
    needed = storage.for_bytes * files
    if storage.total_bytes and storage.free_bytes < needed:
        yield Finding(
            "no-room",
            "serious",
            (
                f"a save of {human_size(needed)} does"
                if files == 1
                else f"a checkpoint of {files:,} files, {human_size(needed)} together, does"
            )
            + f" not fit into the {free} that are free; the previous "
            + (
                "file goes only when the new one is complete"
                if files == 1
                else "files go only when the new ones are complete"
            ),
            (*remedies.show_space(facts), *remedies.SKIP_WHAT_DOES_NOT_FIT),
        )
    elif used > FULL:
        yield Finding(
            "full",
            "serious" if used > VERY_FULL else "warning",
            f"the filesystem is {used:.0%} full ({free} free); beyond {FULL:.0%} it writes slower "
            "and less evenly",
            remedies.show_space(facts),
        )
    folder = facts.folder
    if folder.inodes and (
        folder.inodes_free < _FEW_INODES or used_part(folder.inodes, folder.inodes_free) > VERY_FULL
    ):
        yield Finding(
            "few-inodes",
            "serious" if folder.inodes_free < _FEW_INODES else "warning",
            f"{folder.inodes_free:,} of {folder.inodes:,} inodes are free; without one no file can "
            "be made, however much space is free",
            (
                f"df -i {remedies.place(facts)}",
                f"du --inodes -x --max-depth=2 {remedies.place(facts)} | sort -n | tail",
            ),
        )


def targets(facts: Facts) -> Iterator[Finding]:
    """Of single targets: a file that lies on a full one is full."""
    listed = [one for one in facts.storage.targets if one.total_bytes]
    if not listed:
        return
    used = {one.name: used_part(one.total_bytes, one.free_bytes) for one in listed}
    fullest = max(listed, key=lambda one: used[one.name])
    middle = median(used.values())
    full = [one for one in listed if used[one.name] > FULL]
    if full:
        yield Finding(
            "target-full",
            "serious" if used[fullest.name] > VERY_FULL else "warning",
            f"{plural(len(full), 'target')} of {len(listed)} {_are(full)} more than {FULL:.0%} "
            f"full, {fullest.name} {used[fullest.name]:.0%}: a file that has a stripe there fails "
            "when that is full, whatever is free elsewhere",
            (
                *remedies.show_space(facts),
                *remedies.empty_target(facts, fullest.name),
            ),
        )
    elif len(listed) > 1 and used[fullest.name] - middle > UNEVEN:
        yield Finding(
            "targets-uneven",
            "warning",
            f"{fullest.name} is {used[fullest.name]:.0%} full, and half of the targets no more "
            f"than {middle:.0%}; large files with one stripe do that",
            remedies.empty_target(facts, fullest.name),
        )


def _are(some: list[StorageTarget]) -> str:
    return "is" if len(some) == 1 else "are"


def quota(facts: Facts) -> Iterator[Finding]:
    """It cannot be seen by the calls that tell free space."""
    commands = remedies.show_quota(facts)
    if commands:
        yield Finding(
            "quota-unseen",
            "hint",
            "a quota may leave less than what is shown as free, and cannot be seen from here",
            commands,
        )


# ---- Layout -------------------------------------------------------------------------------------


def _stripes(facts: Facts, count: int) -> int:
    """A number, also where it is all targets."""
    return facts.storage.target_count if count < 0 else count


def layout(facts: Facts) -> Iterator[Finding]:
    """Against the sizes of files."""
    storage = facts.storage
    count = _stripes(facts, storage.stripe_count)
    if storage.family not in STRIPED or not storage.stripes:
        return
    wanted = remedies.wanted_stripes(storage.for_bytes, storage.target_count, facts.files)
    size = human_size(storage.for_bytes)
    if count and count < wanted and storage.for_bytes >= _GIB:
        yield Finding(
            "few-stripes",
            "hint" if storage.stripes_asked else "warning",
            f"a file of {size} would lie on {plural(count, 'target')} ({storage.stripes}) of "
            f"{storage.target_count or 'several'}, and gets the bandwidth of no more"
            + _asks_itself(facts),
            remedies.set_stripes(facts, wanted),
        )
    elif count >= _MANY_STRIPES and storage.for_bytes < count * _MANY_STRIPES * _MIB:
        yield Finding(
            "many-stripes",
            "warning",
            f"a file of {size} would lie on {count} targets ({storage.stripes}): each save asks "
            "all of them for a few bytes, and waits for the slowest",
            remedies.set_progressive(facts)
            if storage.family == "lustre"
            else remedies.set_stripes(facts, wanted),
        )
    if count > 1 and storage.stripe_bytes and storage.stripe_bytes < _MIB:
        yield Finding(
            "small-stripes",
            "warning",
            f"stripes of {human_size(storage.stripe_bytes)} are smaller than what a client sends "
            "in one request (1 to 16 MiB), so that each request is cut",
            remedies.set_stripes(facts, count),
        )
    if (
        storage.is_file
        and 0 < storage.file_stripe_count < min(wanted, count or wanted)
        and storage.family == "lustre"
    ):
        yield Finding(
            "file-few-stripes",
            "hint",
            f"the file itself lies on {plural(storage.file_stripe_count, 'target')} "
            f"({storage.file_stripes}): a layout is chosen when a file is made; the next save "
            "makes a new one",
            (f"lfs migrate -c {wanted} -S 4M {remedies.quoted(facts.folder.asked)}",),
        )


def _asks_itself(facts: Facts) -> str:
    asked = facts.storage.stripes_asked
    return f"; ioshape asks for {asked} by itself, other programs do not" if asked else ""


def crowd(facts: Facts) -> Iterator[Finding]:
    """Many files at a time."""
    storage = facts.storage
    count = _stripes(facts, storage.asked_stripe_count or storage.stripe_count)
    if facts.files < 2 or not count or not storage.target_count:
        return
    at_a_time = facts.coordination.capacity or storage.writers
    if facts.coordination.kind == "local":
        at_a_time *= facts.hosts  # each host has slots of its own
    free_for_all = facts.coordination.kind == "open" or not at_a_time
    writers = facts.files if free_for_all else min(facts.files, at_a_time)
    if writers * count > 2 * storage.target_count:
        most = max(1, storage.target_count // count)
        yield Finding(
            "crowded-targets",
            "warning",
            f"{writers} writers at a time with {plural(count, 'stripe')} each are "
            f"{writers * count / storage.target_count:.0f} streams for each of "
            f"{plural(storage.target_count, 'target')}, which then seeks between them",
            ("export IOSHAPE_COORDINATOR=redis://HOST",)
            if free_for_all
            else (f"ioshape slots set {remedies.quoted(storage.pool)} --capacity {most} --new",),
        )
    if facts.files * count >= _MANY_OBJECTS:
        yield Finding(
            "many-objects",
            "warning",
            f"{facts.files:,} files with {plural(count, 'stripe')} each are "
            f"{facts.files * count:,} objects on the servers for every checkpoint; save_group() "
            "with one writer for each node makes far fewer",
            ("export IOSHAPE_MODE=node",),
        )


def media(facts: Facts) -> Iterator[Finding]:
    """Spinning disks where there is flash."""
    storage = facts.storage
    pool = storage.target_pool
    flash = [name for name in facts.folder.target_pools if _has(name, _FLASH) and name != pool]
    if _has(pool, _DISKS) and not _has(pool, _FLASH):
        other = f", and there is {flash[0]}" if flash else ""
        yield Finding(
            "disk-pool",
            "warning" if flash else "hint",
            f"new files lie in the pool {pool}, by its name one of disks{other}",
            remedies.set_pool(facts, flash[0])
            if flash
            else (f"lfs pool_list {remedies.place(facts)}",)
            if storage.family == "lustre"
            else (),
        )
    elif flash and not _has(pool, _FLASH):
        yield Finding(
            "flash-unused",
            "hint",
            f"there is a pool {flash[0]}, by its name one of flash, and new files are not sent "
            "there",
            remedies.set_pool(facts, flash[0]),
        )
    if storage.rotational and not storage.source.startswith(VIRTUAL_DISKS):
        yield Finding(
            "spinning-disk",
            "hint",
            f"{storage.source or 'the disk'} spins: one writer at a time is quickest there",
            ("export IOSHAPE_SLOTS=1",),
        )


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(part.startswith(words) for part in re.findall("[a-z]+", name.lower()))


def direct(facts: Facts) -> Iterator[Finding]:
    """Past the page cache, or not."""
    storage = facts.storage
    if storage.direct is False:
        fuse = storage.type.startswith("fuse")
        yield Finding(
            "no-direct",
            "warning" if fuse else "hint",
            "there is no direct I/O here: bytes go through the page cache, which costs memory and "
            "a core"
            + (
                "; FUSE filesystems, as a rule, have it when they are mounted with direct_io"
                if fuse
                else ""
            ),
            (f"findmnt -no OPTIONS {remedies.place(facts)}",) if fuse else (),
        )


RULES = (space, targets, quota, layout, crowd, media, direct)
