# SPDX-License-Identifier: Apache-2.0
"""From facts to findings: pure, and in the order in which a change gains most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ioshape._cli.doctor import (
    rules_host,
    rules_installation,
    rules_mount,
    rules_storage,
    rules_tier,
)
from ioshape._cli.doctor.facts import SEVERITIES

if TYPE_CHECKING:
    from ioshape._cli.doctor.facts import Facts, Finding

RULES = (
    *rules_mount.RULES,
    *rules_storage.RULES,
    *rules_tier.RULES,
    *rules_host.RULES,
    *rules_installation.RULES,
)

#: Findings of one severity, what gains most first.
GAIN = (
    # a save that fails, or is lost, now
    *("read-only", "not-writable", "no-room", "few-inodes", "file-size-limit", "target-full"),
    *("in-memory", "container-layer", "not-shared", "no-barrier", "nfs-soft", "nfs-nolock"),
    *("tier-in-memory", "tier-waits"),
    *("full", "staging-memory", "few-open-files", "version-mix", "torch-broken", "clock"),
    # many times faster, or many times less felt by others
    *("sync-mount", "nfs-sync", "crowded-targets", "few-stripes"),
    *("tier-unusable", "tier-not-local", "tier-small"),
    *(
        "password-unreadable",
        "coordinator-away",
        "no-shared-coordinator",
        "torch-unknown",
        "nfs-udp",
        "nfs-noac",
    ),
    *("disk-pool", "no-direct", "many-objects", "many-stripes", "small-stripes", "targets-uneven"),
    # some tens of percent
    *("nfs-wsize", "nfs-one-connection", "no-io-uring", "flash-unused"),
    *("file-few-stripes", "spinning-disk", "memlock", "coordinator-slow"),
    "no-shared-memory",
    # tidiness, and what cannot be seen from here
    *("password-readable", "stale-generations", "stale-files", "no-torch", "no-redis-package"),
    "quota-unseen",
)


def triage(facts: Facts) -> list[Finding]:
    """All findings: the worst first, and of these what gains most."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(
        found,
        key=lambda finding: (SEVERITIES.index(finding.severity), GAIN.index(finding.id)),
    )
