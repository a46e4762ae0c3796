# SPDX-License-Identifier: Apache-2.0
"""Calls of the library fail: each once, or from there on; and those that come because of it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from striped import INSTANT, striped, unavailable

from . import harm, sites
from .sites import Sites
from .trial import Trial

#: Beside the ledger, whose figure it proves.
REACHED = Path(__file__).resolve().with_name("reached.txt")

#: Of each act in one trial.
COUNT = 32

#: Trials are in memory, where nothing waits for a disk, but for one of so many: it is on a disk,
#: and the next one on a filesystem with stripes, each of these in turn.
EACH = 4
PLAYS = ("lustre", "beegfs", "ceph")
MEMORY = Path("/dev/shm")

#: Of a directory, by which others than the kernel's client are known.
CEPH_LAYOUT = b"stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs_data"


@dataclass(frozen=True)
class Place:
    path: Path
    #: Where the machine shows the Lustre that it has.
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
def _trials(work: Path, kept: Path | None) -> Iterator[Callable[[int], Trial]]:
    harm.check()
    here = work / REACHED.name
    earlier = sites.read(here) | (sites.read(kept) if kept else set())
    known = Sites(work, earlier)

    def attempt(seed: int) -> Trial:
        missing = known.write_missing() if known.reached else None
        with place(seed, work) as where:
            done = harm.run("faults", seed, COUNT, where.path, lustre=where.lustre, missing=missing)
        known.add(done.sites)
        sites.write(here, known.places)
        return done.trial("faults", ("wrong",), faults_sites_percent=known.percent)

    yield attempt
    (work / "not-reached.txt").write_text("\n".join([*known.missing, ""]))


def trials(work: Path) -> AbstractContextManager[Callable[[int], Trial]]:
    """They go on where earlier ones ended, on this machine or another."""
    return _trials(work, REACHED)


def short(work: Path) -> AbstractContextManager[Callable[[int], Trial]]:
    """Without what earlier ones reached."""
    return _trials(work, None)


def keep(work: Path) -> None:
    """Notes what was reached, where the ledger is."""
    shutil.copyfile(work / REACHED.name, REACHED)
