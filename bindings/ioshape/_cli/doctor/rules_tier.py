# SPDX-License-Identifier: Apache-2.0
"""What an administrator would say of the disk that saves go to first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ioshape._cli.doctor import remedies
from ioshape._cli.doctor.facts import Finding
from ioshape._cli.output import human_seconds, human_size, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._cli.doctor.facts import Facts

_LONG_S = 3600.0
#: One is drained while the next one is saved.
_CHECKPOINTS = 2


def there(facts: Facts) -> Iterator[Finding]:
    """Whether saves can go there."""
    tier = facts.tier
    if tier is None or tier.usable:
        return
    quoted = remedies.quoted(tier.folder)
    user = facts.host.user or "this user"
    why, commands = f"may not be written to by {user}", [f"ls -ld {quoted}"]
    if not tier.exists:
        why, commands = "does not exist", ["lsblk -o NAME,SIZE,FSTYPE,MOUNTPOINT"]
    if tier.owner is None:
        commands.append(f"sudo install -d -m 1777 {quoted}")
    else:
        own = remedies.quoted(tier.own)
        why = f"has a folder for {user} that user {tier.owner} has made"
        commands = [f"ls -ld {own}", f"sudo rm -r {own}"]
    yield Finding(
        "tier-unusable",
        "warning",
        f"the tier {tier.folder} {why}: saves go directly to their destinations",
        tuple(commands),
    )


def kind(facts: Facts) -> Iterator[Finding]:
    """Whether it is a disk of this node."""
    tier = facts.tier
    if tier is None or not tier.usable:
        return
    findmnt = f"findmnt -T {remedies.quoted(tier.folder)}"
    if tier.in_memory:
        yield Finding(
            "tier-in-memory",
            "warning",
            f"the tier {tier.folder} lies in memory: what has not been drained is gone with the "
            "power, though saves have called it durable",
            (findmnt,),
        )
    if tier.remote or tier.is_destination:
        where = "is shared with other hosts" if tier.remote else "is where checkpoints end, too"
        yield Finding(
            "tier-not-local",
            "warning",
            f"the filesystem of the tier {tier.folder} {where}: each save is written there twice, "
            "and nothing is gained",
            (findmnt,),
        )


def space(facts: Facts) -> Iterator[Finding]:
    """For what the ranks of this host save."""
    tier = facts.tier
    if tier is None or not tier.usable:
        return
    needed = _CHECKPOINTS * facts.storage.for_bytes * max(facts.files_near, 1)
    room = tier.free_bytes + tier.drained_bytes
    if room < needed:
        yield Finding(
            "tier-small",
            "warning",
            f"the tier {tier.folder} has room for {human_size(room)}, and two checkpoints of this "
            f"host take {human_size(needed)}: saves for which there is none go directly",
            (
                f"ioshape ls {remedies.quoted(tier.folder)}",
                f"du -xh -d 2 {remedies.quoted(tier.folder)}",
            ),
        )


def waiting(facts: Facts) -> Iterator[Finding]:
    """What nobody drains."""
    tier = facts.tier
    if tier is None or tier.draining or tier.oldest_s < _LONG_S:
        return
    yield Finding(
        "tier-waits",
        "warning",
        f"{plural(tier.waiting, 'checkpoint')} ({human_size(tier.waiting_bytes)}) on the tier "
        f"{tier.folder} {'waits' if tier.waiting == 1 else 'wait'} to be drained, for "
        f"{human_seconds(tier.oldest_s)} by now, and nobody drains: only this node has that",
        (f"ioshape drain {remedies.quoted(tier.folder)}",),
    )


RULES = (there, kind, space, waiting)
