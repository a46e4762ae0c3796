# SPDX-License-Identifier: Apache-2.0
"""Make system calls of the library fail, and calls that the library makes after a failure."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from striped import INSTANT, striped, unavailable

from . import harm
from .trial import Trial

#: Failed calls of each act in one trial.
COUNT = 32

#: One of this many trials is on the disk, and one on a filesystem with stripes, of each kind in
#: turn. Others are in memory, where no call waits for a disk.
EACH = 4
PLAYS = ("lustre", "beegfs", "ceph")
MEMORY = Path("/dev/shm")

#: Attribute of directories by which other clients than the kernel's are recognized.
CEPH_LAYOUT = b"stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs_data"


@dataclass(frozen=True)
class Place:
    path: Path
    #: folder that stands for the machine's /sys/fs/lustre; None: no Lustre
    lustre: Path | None = None


@contextlib.contextmanager
def place(seed: int, work: Path) -> Iterator[Place]:
    if seed % EACH == 1 and not unavailable():
        play = PLAYS[seed // EACH % len(PLAYS)]
        targets: dict[str, object] = {"targets": 100, "fsname": "mgs@tcp:/storm"}
        with striped("ssd", play=play, **targets, **INSTANT) as mount:
            if play == "ceph":
                os.setxattr(mount.path, "ceph.dir.layout", CEPH_LAYOUT)
            shown = mount.backing / "sys" / "fs" / "lustre"
            yield Place(mount.path, shown if shown.exists() and not os.geteuid() else None)
    elif seed % EACH and MEMORY.is_dir():
        with tempfile.TemporaryDirectory(prefix="ioshape-faults-", dir=MEMORY) as folder:
            yield Place(Path(folder))
    else:
        yield Place(work)


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    harm.check()

    def attempt(seed: int) -> Trial:
        with place(seed, work) as where:
            done = harm.run("faults", seed, COUNT, where.path, lustre=where.lustre)
        return done.trial("faults", ("wrong",))

    yield attempt
