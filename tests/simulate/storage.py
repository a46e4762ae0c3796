# SPDX-License-Identifier: Apache-2.0
"""Model the speed of a shared storage.

Targets are as in stripefs (tests/c/support/stripefs/README.md), but so many that only their sums
matter. Files are striped over targets. A writer with a slot has its targets for itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """A storage with spinning disks."""

    bandwidth: float = 1e12  # sum over all targets, in bytes per second
    target_bandwidth: float = 60e6
    stripes: int = 8
    #: Fraction of its targets' bandwidth that a lone writer reaches. On stripefs torch.save reached
    #: 0.88 and ioshape.save 0.91.
    alone: float = 0.9
    #: Time to create a file, sync it and rename it.
    overhead_s: float = 0.1

    @property
    def writers(self) -> int:
        """The number of writers that each have their own targets."""
        return max(1, round(self.bandwidth / self.writer_bandwidth))

    @property
    def writer_bandwidth(self) -> float:
        return self.stripes * self.target_bandwidth

    def write_s(self, n_bytes: float) -> float:
        """Return the time that a file of this size takes its writer."""
        return n_bytes / (self.writer_bandwidth * self.alone) + self.overhead_s


HDD = Storage()
