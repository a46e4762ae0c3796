# SPDX-License-Identifier: Apache-2.0
"""How fast a shared storage is for those that write to it.

Targets as in stripefs (tests/c/support/stripefs/README.md), so many that only their sums matter. A
target serves one part of a request after the other, and moves its head in between unless the next
part goes on where the last one ended. Files are on targets in turn, as stripefs and Lustre place
them.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Storage:
    """Of spinning disks, unless told otherwise."""

    bandwidth: float = 1e12  # of all targets, bytes per second
    target_bandwidth: float = 60e6
    seek_s: float = 0.008
    stripes: int = 8
    #: where files share a target, it serves so many bytes of one before it seeks the next: 8 to 32
    #: files on the 8 targets of a stripefs come to 1.3 to 1.5 MiB
    queued_bytes: float = 1.3 * MIB
    #: of its targets' bandwidth, for a writer that has them for itself: torch.save came to 0.88 on
    #: stripefs and ioshape.save to 0.91
    alone: float = 0.9
    #: to create a file, to make it durable and to give it its name
    overhead_s: float = 0.1

    @property
    def writers(self) -> int:
        """As many as have targets of their own."""
        return max(1, round(self.bandwidth / self.writer_bandwidth))

    @property
    def writer_bandwidth(self) -> float:
        return self.stripes * self.target_bandwidth

    @property
    def crowded(self) -> float:
        """What is left of the bandwidth where two or more files share each target: each of their
        parts begins with a seek."""
        serves_s = self.queued_bytes / self.target_bandwidth
        return serves_s / (serves_s + self.seek_s)

    def efficiency(self, writers: float) -> float:
        """Of all targets, while so many write. The second file on a target makes it seek."""
        shared = min(max(writers / self.writers - 1, 0.0), 1.0)
        return self.alone + (min(self.crowded, self.alone) - self.alone) * shared

    def rate(self, writers: float) -> float:
        """Bytes per second of each of them."""
        busy = min(1.0, writers * self.writer_bandwidth / self.bandwidth)
        return self.bandwidth * busy * self.efficiency(writers) / writers


HDD = Storage()
SSD = Storage(target_bandwidth=250e6, seek_s=0.00005)
#: takes no time
INSTANT = Storage(bandwidth=1e30, target_bandwidth=1e25, seek_s=0, alone=1.0, overhead_s=0)
