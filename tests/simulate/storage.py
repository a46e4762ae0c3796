# SPDX-License-Identifier: Apache-2.0
"""Model the speed of a shared storage.

Targets are as in stripefs (tests/c/support/stripefs/README.md), but so many that only their sums
matter. A target serves one part of a request after another. It seeks between two parts, unless the
next one continues where the last one ended. Files are striped round robin over targets, as on
stripefs and Lustre.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Storage:
    """A storage, by default with spinning disks."""

    bandwidth: float = 1e12  # sum over all targets, in bytes per second
    target_bandwidth: float = 60e6
    seek_s: float = 0.008
    stripes: int = 8
    #: Bytes of one file that a shared target serves before it seeks to another file. 8 to 32 files
    #: on the 8 targets of a stripefs had 1.3 to 1.5 MiB.
    queued_bytes: float = 1.3 * MIB
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

    @property
    def crowded(self) -> float:
        """The fraction of the bandwidth that is left where files share each target.

        Each part of a file then begins with a seek.
        """
        serves_s = self.queued_bytes / self.target_bandwidth
        return serves_s / (serves_s + self.seek_s)

    def efficiency(self, writers: float) -> float:
        """Return the efficiency of all targets with this many writers.

        The second file on a target makes it seek.
        """
        shared = min(max(writers / self.writers - 1, 0.0), 1.0)
        return self.alone + (min(self.crowded, self.alone) - self.alone) * shared

    def rate(self, writers: float) -> float:
        """Return bytes per second for each of these writers."""
        busy = min(1.0, writers * self.writer_bandwidth / self.bandwidth)
        return self.bandwidth * busy * self.efficiency(writers) / writers


HDD = Storage()
SSD = Storage(target_bandwidth=250e6, seek_s=0.00005)
#: A storage that takes no time.
INSTANT = Storage(bandwidth=1e30, target_bandwidth=1e25, seek_s=0, alone=1.0, overhead_s=0)
