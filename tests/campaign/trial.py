# SPDX-License-Identifier: Apache-2.0
"""The result of one trial of the campaign."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trial:
    """Figures and findings of a trial."""

    #: Counts that are summed over all trials.
    counts: Mapping[str, int] = field(default_factory=dict)
    #: Values of which the largest counts.
    worst: Mapping[str, float] = field(default_factory=dict)
    #: Messages that say what is wrong and how to look at it. The trial's seed reproduces it.
    findings: Sequence[str] = ()


class CannotTry(Exception):
    """A trial is impossible here. The message says why, for example for lack of rights to mount."""
