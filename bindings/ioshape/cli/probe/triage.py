# SPDX-License-Identifier: Apache-2.0
"""From facts to findings: pure, and in the order in which they matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ioshape.cli.probe import rules_host, rules_mount, rules_storage
from ioshape.cli.probe.facts import SEVERITIES

if TYPE_CHECKING:
    from ioshape.cli.probe.facts import Facts, Finding

RULES = (*rules_mount.RULES, *rules_storage.RULES, *rules_host.RULES)


def triage(facts: Facts) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
