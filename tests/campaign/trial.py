# SPDX-License-Identifier: Apache-2.0
"""What one trial of the campaign found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trial:
    """The names are those of figures; see `ledger.WANTED`."""

    #: Summed over all trials.
    counts: Mapping[str, int] = field(default_factory=dict)
    #: The largest of all trials counts.
    worst: Mapping[str, float] = field(default_factory=dict)
    #: That of the latest trial counts.
    latest: Mapping[str, float] = field(default_factory=dict)
    #: Sentences: what is wrong, and how to look at it. The trial's seed makes it happen again.
    findings: Sequence[str] = ()


class CannotTry(Exception):
    """It says what, and why not here: no right to mount, for example."""
