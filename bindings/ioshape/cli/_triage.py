# SPDX-License-Identifier: Apache-2.0
"""From facts to findings: pure, and in the order in which they matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ioshape.cli import _rules_host, _rules_mount, _rules_storage
from ioshape.cli._facts import SEVERITIES

if TYPE_CHECKING:
    from ioshape.cli._facts import Facts, Finding

RULES = (*_rules_mount.RULES, *_rules_storage.RULES, *_rules_host.RULES)


def triage(facts: Facts) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
